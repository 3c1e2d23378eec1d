"""Readers of what models write: one file per format, each a generator over a `TextSource`."""
