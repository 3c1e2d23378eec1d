"""Shared memory between the engine and its workers."""
