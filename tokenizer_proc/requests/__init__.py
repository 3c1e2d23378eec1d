"""Request validation, one module for each API."""
