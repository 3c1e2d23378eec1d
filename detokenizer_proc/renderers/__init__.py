"""Response bodies and events, one module for each API."""
