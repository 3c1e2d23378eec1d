"""The scheduler and its policies. No I/O."""
