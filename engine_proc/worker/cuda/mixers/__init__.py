"""Kernels of mixers whose sequences have states: convolutions and recurrences."""
