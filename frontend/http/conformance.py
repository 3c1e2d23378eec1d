"""Request heads that a server must reject, by RFC 9110 and RFC 9112 (HTTP/1.1). Pure."""

import re
from collections.abc import Sequence
from functools import lru_cache

from headrace.frontend.http.rejections import Rejection
from headrace.frontend.http.request_head import JSON, RequestHead

POST = "POST"
VERSIONS = ("1.0", "1.1")
# RFC 3986, 3.2.2 and 3.2.3: a name, an IPv4 address or an IP literal, and a port. RFC 9112, 3.2
# lets a client send an empty value.
HOST = re.compile(
    rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})*(?::[0-9]*)?"
    rb"|\[[0-9A-Za-z:.%\-_~]+\](?::[0-9]*)?"
)
NOT_SERVED = Rejection(
    505,
    "this version of HTTP is not served; use HTTP/1.1",
    "invalid_request_error",
    "http_version",
)


def framing_fault(method: bytes, version: str, codings: Sequence[bytes]) -> Rejection | None:
    """Return why it is not known where a request ends, or None; its connection must close.

    llhttp has refused Content-Length beside Transfer-Encoding, and several of either.

    Args:
        codings: the values of Transfer-Encoding.
    """
    if version not in VERSIONS:
        return NOT_SERVED
    if method == b"CONNECT":
        message = "this server is no proxy; CONNECT is not served"
        return rejection(405, message, "method_not_allowed")
    if not codings:
        return None
    if version == "1.0":
        return rejection(400, "Transfer-Encoding needs HTTP/1.1", "invalid_http")
    if b",".join(codings).strip().lower() != b"chunked":
        return rejection(501, "Transfer-Encoding must be chunked", "transfer_encoding")
    return None


def head_fault(version: str, head: RequestHead) -> Rejection | None:
    """Return why a complete head is refused, or None."""
    num_hosts = head.num_hosts
    if num_hosts != 1 and (num_hosts or version != "1.0"):
        return rejection(400, f"the request has {num_hosts} Host headers; send one", "invalid_host")
    if not is_host(head.host):
        return rejection(400, "the Host header is not HOST or HOST:PORT", "invalid_host")
    if head.num_authorizations > 1:
        message = f"the request has {head.num_authorizations} Authorization headers; send one"
        return rejection(400, message, "repeated_header")
    return None


@lru_cache(maxsize=256)
def is_host(value: bytes) -> bool:
    """Return whether a Host header is HOST, HOST:PORT or empty."""
    return HOST.fullmatch(value) is not None


def body_fault(method: str, head: RequestHead) -> Rejection | None:
    """Return why a body's type is refused, or None. A POST without a body needs no type.

    A page of another site can send any other type, or none, without asking first (CORS).
    """
    if method != POST or not head.has_body or head.media_type == JSON:
        return None
    return rejection(
        415, "the body must be JSON: send Content-Type: application/json", "unsupported_media_type"
    )


def rejection(status: int, message: str, code: str) -> Rejection:
    """Return the refusal of a request that breaks a rule."""
    return Rejection(status, message, "invalid_request_error", code)
