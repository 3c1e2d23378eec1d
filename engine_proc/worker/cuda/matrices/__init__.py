"""Weight matrices on GPUs, by format."""
