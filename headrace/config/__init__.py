"""Flags, and the configuration of each process that follows from them."""
