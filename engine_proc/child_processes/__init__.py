"""The engine's child processes."""
