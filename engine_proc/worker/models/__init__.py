"""Decoder specifications, from the configurations of model families."""
