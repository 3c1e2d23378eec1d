"""The engine: which tokens run next, and the workers that run them."""
