"""The supervisor: starts processes, watches them, replaces them."""
