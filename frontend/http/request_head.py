"""What the frontend reads of a request: a few headers."""

import os
import re
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

SCHEME = b"bearer "
REQUEST_ID = b"x-request-id"
SAFE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")  # neither a header nor a log breaks of it
Headers = Sequence[tuple[bytes, bytes]]

_start, _numbers = os.urandom(8).hex().encode(), count(1)


class RequestHead(NamedTuple):
    """The headers that matter here."""

    length: int = 0  # of the body; 0 where it is not declared
    key: bytes | None = None  # as `Authorization: Bearer KEY` or Anthropic's `x-api-key: KEY`
    wants_timing: bool = False  # x-request-timing: the response is to say how long each part took
    has_body: bool = False
    media_type: bytes = b""  # of Content-Type, in lower case, without parameters
    hosts: tuple[bytes, ...] = ()
    num_authorizations: int = 0
    is_anthropic: bool = False  # anthropic-version: the client is one of Anthropic's API

    @classmethod
    def of(cls, headers: Headers) -> "RequestHead":
        """Read headers whose names are in lower case."""
        fields = dict(headers)  # the last of each name
        declared = fields.get(b"content-length", b"")
        length = int(declared) if declared.isdigit() else 0
        authorizations = [value for name, value in headers if name == b"authorization"]
        return cls(
            length=length,
            key=key_of(authorizations, fields.get(b"x-api-key")),
            wants_timing=fields.get(b"x-request-timing", b"") not in (b"", b"0", b"false"),
            has_body=length > 0 or b"transfer-encoding" in fields,
            media_type=fields.get(b"content-type", b"").partition(b";")[0].strip().lower(),
            hosts=tuple([value for name, value in headers if name == b"host"]),
            num_authorizations=len(authorizations),
            is_anthropic=b"anthropic-version" in fields,
        )


def key_of(authorizations: Sequence[bytes], api_key: bytes | None) -> bytes | None:
    """Return the key of a client: of its Authorization, else of its x-api-key."""
    for value in authorizations:
        if value[: len(SCHEME)].lower() == SCHEME:
            return value[len(SCHEME) :].strip()
    return None if api_key is None else api_key.strip()


def request_id_of(headers: Headers) -> bytes:
    """Return the client's x-request-id where that is safe to repeat, else a new one."""
    for name, value in headers:
        if name == REQUEST_ID and SAFE_ID.fullmatch(value):
            return value
    return new_request_id()


def new_request_id() -> bytes:
    """Return an id that no other request has, of this process or another."""
    return b"%b-%08x" % (_start, next(_numbers))
