"""Weights as files store them."""
