"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"  # ends a stream of OpenAI's and SGLang's APIs


def event(body: dict[str, Any] | msgspec.Struct, name: str = "") -> bytes:
    """Return one event, of a type where the API names them."""
    return event_of(msgspec.json.encode(body), name)


def event_of(data: bytes, name: str = "") -> bytes:
    """Return one event of data that is encoded already, without line feeds."""
    kind = f"event: {name}\n".encode() if name else b""
    return kind + b"data: " + data + b"\n\n"
