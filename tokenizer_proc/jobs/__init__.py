"""Jobs: handlers as generators, and aborts."""
