"""What a server must refuse of a request's head, by RFC 9110 and RFC 9112 (HTTP/1.1). Pure."""

import re

from headrace.frontend.http.rejections import Rejection
from headrace.frontend.http.request_head import Headers, RequestHead

JSON = b"application/json"
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


def framing_fault(method: str, version: str, headers: Headers) -> Rejection | None:
    """Return why it is not known where a request ends, or None; its connection must close.

    llhttp has refused Content-Length beside Transfer-Encoding, and several of either.
    """
    if version not in VERSIONS:
        return NOT_SERVED
    if method == "CONNECT":
        return rejection(
            405, "this server is no proxy; CONNECT is not served", "method_not_allowed"
        )
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return None
    if version == "1.0":
        return rejection(400, "Transfer-Encoding needs HTTP/1.1", "invalid_http")
    if b",".join(codings).strip().lower() != b"chunked":
        return rejection(501, "Transfer-Encoding must be chunked", "transfer_encoding")
    return None


def head_fault(version: str, head: RequestHead) -> Rejection | None:
    """Return why a head that ends where it says is refused, or None."""
    hosts = head.hosts
    if len(hosts) != 1 and (hosts or version != "1.0"):
        return rejection(
            400, f"the request has {len(hosts)} Host headers; send one", "invalid_host"
        )
    if hosts and HOST.fullmatch(hosts[0]) is None:
        return rejection(400, "the Host header is not HOST or HOST:PORT", "invalid_host")
    if head.num_authorizations > 1:
        message = f"the request has {head.num_authorizations} Authorization headers; send one"
        return rejection(400, message, "repeated_header")
    return None


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
