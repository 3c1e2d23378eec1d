"""Collective operations between workers on CPUs."""
