"""Models that run in transformers' modules."""
