"""The HTTP client."""
