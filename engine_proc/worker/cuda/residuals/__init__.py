"""Kernels around the layers of Gemma 3n and 4: further residuals, embeddings per layer."""
