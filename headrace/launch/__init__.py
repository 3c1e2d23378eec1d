"""Starts a ring: for the command line, for a program, for a client."""
