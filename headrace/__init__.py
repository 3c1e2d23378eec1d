"""Headrace: a multi-process LLM serving engine. Importing this package costs nothing."""

__version__ = "0.1.0"
