"""Engines on the nodes of a Ray cluster: where each is, and another one where one has ended."""
