"""Streams whose events have names, and an answer to stream."""

import json
from typing import Any

from pydantic import TypeAdapter

from headrace.detokenizer_proc.parsers.pieces import (
    Arguments,
    Content,
    Piece,
    Thought,
    ToolCallStart,
)

PIECES: list[Piece] = [
    Thought("The sea"),
    Thought("?"),
    Content("I'll look"),
    Content("."),
    ToolCallStart(0, "call_1", "look"),
    Arguments(0, '{"at":'),
    Arguments(0, '"sea"}'),
    ToolCallStart(1, "call_2", "wait"),
]


def named_events(data: bytes, kind: TypeAdapter[Any]) -> list[Any]:
    """Return the events in `data`, checked by a client's types."""
    found = []
    for entry in data.decode().split("\n\n")[:-1]:
        name, body = entry.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        kind.validate_python(event)
        found.append(event)
    return found
