"""Reads config.json, which may hold numbers that JSON does not have."""

import re
from typing import Any

import msgspec

INFINITY = re.compile(rb"(?<=[\[,:\s])Infinity(?=[\],}\s])")


def decode_config(data: bytes) -> dict[str, Any]:
    """Decode an object. Infinity becomes `{"__float__": "Infinity"}`, as transformers 5 writes it.

    Raises:
        BAD_JSON: it is something else.
    """
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        replaced = INFINITY.sub(b'{"__float__": "Infinity"}', data)
        if replaced == data:
            raise
        return msgspec.json.decode(replaced, type=dict[str, Any])
