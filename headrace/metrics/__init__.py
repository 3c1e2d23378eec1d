"""Prometheus metrics, read from the board."""
