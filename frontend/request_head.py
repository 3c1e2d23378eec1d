"""What the frontend reads of a request: a few headers."""

from collections.abc import Iterable
from typing import NamedTuple

SCHEME = b"bearer "


class RequestHead(NamedTuple):
    """The headers that matter here."""

    length: int  # of the body; 0 where it is not declared
    key: bytes | None  # as `Authorization: Bearer KEY` or, with Anthropic, `x-api-key: KEY` has it
    wants_timing: bool  # x-request-timing: the response is to say how long each part took

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]]) -> "RequestHead":
        """Read headers whose names are in lower case."""
        length, key, wants_timing = 0, None, False
        for name, value in headers:
            if name == b"content-length":
                length = int(value) if value.isdigit() else 0
            elif name == b"authorization" and value[: len(SCHEME)].lower() == SCHEME:
                key = value[len(SCHEME) :].strip()
            elif name == b"x-api-key" and key is None:
                key = value.strip()
            elif name == b"x-request-timing":
                wants_timing = value not in (b"", b"0", b"false")
        return cls(length, key, wants_timing)
