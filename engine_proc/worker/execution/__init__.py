"""Execution of a step: executors, the sampler, the embedder."""
