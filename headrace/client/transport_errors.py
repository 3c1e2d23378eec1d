"""Translates httpx's transport errors to `ApiConnectionError` and its subclasses."""

import contextlib
from collections.abc import Iterator

import httpx

from headrace.errors import ApiConnectionError, ApiTimeoutError

HTTPX_ERRORS = (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL)


@contextlib.contextmanager
def transport_errors() -> Iterator[None]:
    """Raise what httpx raises as `ApiTimeoutError` or `ApiConnectionError`."""
    try:
        yield
    except HTTPX_ERRORS as error:
        raise of_httpx(error) from None


def of_httpx(error: Exception) -> ApiConnectionError:
    """Return the client error for an httpx error, with the URL, the cause and, for a timeout, the
    remedy."""
    request = getattr(error, "_request", None)  # `request` raises where there is none
    where = "the server" if request is None else str(request.url.copy_with(raw_path=b"/"))[:-1]
    cause = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
        cause = f"{where} cannot be reached: {cause}"
    elif isinstance(error, httpx.TimeoutException):
        phase = type(error).__name__.removesuffix("Timeout").lower()
        seconds = {} if request is None else request.extensions.get("timeout", {})
        limit = f" for {seconds[phase]:g} s" if phase in seconds else ""
        cause = f"{where} was silent{limit}; raise timeout_s to wait longer"
    else:
        cause = f"the connection to {where} failed: {cause}"
    kind = ApiTimeoutError if isinstance(error, httpx.TimeoutException) else ApiConnectionError
    return kind(cause)
