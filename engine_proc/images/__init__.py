"""Encoder scheduling: which images are encoded next, which embeddings stay."""
