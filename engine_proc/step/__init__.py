"""A step as arrays for the workers."""
