"""A sequence: its tokens, its grammar, its images."""
