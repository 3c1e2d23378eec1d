"""The mock engine: the messages and limits of the engine without a model."""
