"""Tensor parallelism: shards, groups, collectives."""
