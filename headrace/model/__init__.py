"""Metadata of models: files, tokenizers, output formats, families."""
