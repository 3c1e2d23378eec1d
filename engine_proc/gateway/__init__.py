"""The gateway of an engine that serves another machine: it is the rest of the ring to it."""
