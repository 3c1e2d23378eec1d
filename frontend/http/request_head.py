"""The headers of a request that the frontend reads."""

import os
import re
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

SCHEME = b"bearer "
JSON = b"application/json"
REQUEST_ID = b"x-request-id"
SAFE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")  # neither a header nor a log breaks of it
Headers = Sequence[tuple[bytes, bytes]]

_start, _numbers = os.urandom(8).hex(), count(1)


class RequestHead(NamedTuple):
    """The headers that matter here. Of a name that is repeated, the last counts."""

    length: int = 0  # of the body; 0 where it is not declared
    key: bytes | None = None  # as `Authorization: Bearer KEY` or Anthropic's `x-api-key: KEY`
    wants_timing: bool = False  # x-request-timing: the response is to say how long each part took
    has_body: bool = False
    media_type: bytes = b""  # of Content-Type, in lower case, without parameters
    host: bytes = b""
    num_hosts: int = 0
    num_authorizations: int = 0
    is_anthropic: bool = False  # anthropic-version: the client is one of Anthropic's API
    id: bytes = b""  # x-request-id: the client's where that is safe to repeat, else a new one

    @classmethod
    def of(cls, headers: Headers) -> "RequestHead":
        """Read headers whose names are in lower case."""
        fields = dict(headers)
        field = fields.get
        declared = field(b"content-length", b"")
        length = int(declared) if declared.isdigit() else 0
        media_type = field(b"content-type", b"")
        if media_type != JSON:
            media_type = media_type.partition(b";")[0].strip().lower()
        authorization = field(b"authorization")
        num_hosts, num_authorizations = int(b"host" in fields), int(authorization is not None)
        if len(fields) < len(headers):  # a name is repeated
            names = [name for name, _ in headers]
            num_hosts, num_authorizations = names.count(b"host"), names.count(b"authorization")
        id = field(REQUEST_ID)
        return cls(
            length,
            key_of(authorization, field(b"x-api-key")),
            field(b"x-request-timing", b"") not in (b"", b"0", b"false"),
            length > 0 or b"transfer-encoding" in fields,
            media_type,
            field(b"host", b""),
            num_hosts,
            num_authorizations,
            b"anthropic-version" in fields,
            new_request_id() if id is None or not SAFE_ID.fullmatch(id) else id,
        )


def key_of(authorization: bytes | None, api_key: bytes | None) -> bytes | None:
    """Return the key of a client: of its Authorization, else of its x-api-key."""
    if authorization is not None and authorization[: len(SCHEME)].lower() == SCHEME:
        return authorization[len(SCHEME) :].strip()
    return None if api_key is None else api_key.strip()


def new_request_id() -> bytes:
    """Return an id that no other request has, of this process or another."""
    return f"{_start}-{next(_numbers):08x}".encode()
