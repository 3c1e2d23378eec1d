"""Detokenizer processes: token ids in, HTTP response bytes out."""
