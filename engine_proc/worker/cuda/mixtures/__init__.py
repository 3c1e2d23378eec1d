"""Kernels of mixtures of experts: routing, products by expert, and their sum."""
