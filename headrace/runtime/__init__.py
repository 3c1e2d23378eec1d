"""The runtime of a child process: context, heartbeat, stack dumps."""
