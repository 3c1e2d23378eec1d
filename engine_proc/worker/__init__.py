"""Workers: the only processes that execute a model."""
