"""The HTTP process: bytes in, bytes out."""
