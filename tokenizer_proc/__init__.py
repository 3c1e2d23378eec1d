"""Tokenizer processes: request bodies in, token ids out."""
