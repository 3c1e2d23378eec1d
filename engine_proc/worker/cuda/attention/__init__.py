"""Attention over pages: what programs compute, and the kernels."""
