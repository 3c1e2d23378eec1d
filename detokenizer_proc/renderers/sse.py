"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"  # ends a stream of OpenAI's and SGLang's APIs


def event(body: dict[str, Any] | msgspec.Struct, name: str = "") -> bytes:
    """Return one event, of a type where the API names them."""
    kind = f"event: {name}\n".encode() if name else b""
    return kind + b"data: " + msgspec.json.encode(body) + b"\n\n"
