"""What the frontend reads of a request: a few headers."""

from typing import NamedTuple

from starlette.types import Scope

SCHEME = b"bearer "


class RequestHead(NamedTuple):
    """The headers that matter here."""

    length: int  # of the body; 0 where it is not declared
    key: bytes | None  # as `Authorization: Bearer KEY` or, with Anthropic, `x-api-key: KEY` has it
    wants_timing: bool  # x-request-timing: the response is to say how long each part took

    @classmethod
    def of(cls, scope: Scope) -> "RequestHead":
        """Read the headers of an ASGI scope, whose names are in lower case."""
        length, key, wants_timing = 0, None, False
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = int(value) if value.isdigit() else 0
            elif name == b"authorization" and value[: len(SCHEME)].lower() == SCHEME:
                key = value[len(SCHEME) :].strip()
            elif name == b"x-api-key" and key is None:
                key = value.strip()
            elif name == b"x-request-timing":
                wants_timing = value not in (b"", b"0", b"false")
        return cls(length, key, wants_timing)
