"""Rejections of the frontend, from constants: nothing is parsed here."""

from dataclasses import dataclass

from headrace.errors import RequestError, anthropic_type
from headrace.routes import ANTHROPIC_PATHS, COHERE_PATHS, JINA_PATHS


@dataclass(frozen=True)
class Rejection:
    """The reason for a rejection. Texts are plain ASCII without quotes."""

    status: int
    message: str
    type: str
    code: str
    retry_after_s: int | None = None
    limit: str = ""  # the flag of what there is no room for
    allow: str = ""  # the method that is right

    @classmethod
    def of(cls, error: RequestError) -> "Rejection":
        """Return the rejection by an error that other processes raise as well."""
        assert error.code is not None
        return cls(error.status, str(error), error.type, error.code)


def error_body(rejection: Rejection, path: str = "") -> bytes:
    """Return the body of an error response in OpenAI's shape, or in that of a path's API."""
    if path.startswith(ANTHROPIC_PATHS):
        return anthropic_body(rejection)
    if path in COHERE_PATHS:
        return f'{{"message":"{rejection.message}"}}'.encode("ascii")
    detail = f',"detail":"{rejection.message}"' if path in JINA_PATHS else ""
    return (
        f'{{"error":{{"message":"{rejection.message}","type":"{rejection.type}","param":null,'
        f'"code":"{rejection.code}"}}{detail}}}'
    ).encode("ascii")


def anthropic_body(rejection: Rejection) -> bytes:
    """Return the body in Anthropic's shape."""
    kind = anthropic_type(rejection.status)
    return (
        f'{{"type":"error","error":{{"type":"{kind}","message":"{rejection.message}"}}}}'
    ).encode("ascii")


UNAUTHORIZED = Rejection(
    401,
    "this server needs an API key: send the header Authorization: Bearer KEY",
    "authentication_error",
    "invalid_api_key",
)

STOPPING = Rejection(
    503, "the server is stopping; try again at another one", "server_error", "stopping", 1
)


def too_large(max_body_bytes: int) -> Rejection:
    """Return the refusal of a body that is too large."""
    return Rejection(
        413,
        f"the request body is larger than {max_body_bytes} bytes (--max-body-bytes)",
        "invalid_request_error",
        "body_too_large",
    )


def overloaded(retry_after_s: int, why: str, limit: str = "") -> Rejection:
    """Return the refusal of a request for which there is no room now, by the flag `limit`."""
    named = f" ({limit})" if limit else ""
    return Rejection(
        429,
        f"{why}{named}; try again in {retry_after_s} s",
        "rate_limit_error",
        "rate_limit_exceeded",
        retry_after_s,
        limit,
    )
