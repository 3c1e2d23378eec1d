"""What is refused at the door, in OpenAI's error shape, from constants: nothing is parsed here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Why a request is not let in. Texts are plain ASCII without quotes."""

    status: int
    message: str
    type: str
    code: str
    retry_after_s: int | None = None
    limit: str = ""  # the flag of what there is no room for


def error_body(refusal: Refusal) -> bytes:
    """Return the body of an error response."""
    return (
        f'{{"error":{{"message":"{refusal.message}","type":"{refusal.type}","param":null,'
        f'"code":"{refusal.code}"}}}}'
    ).encode("ascii")


UNAUTHORIZED = Refusal(
    401,
    "this server needs an API key: send the header Authorization: Bearer KEY",
    "authentication_error",
    "invalid_api_key",
)


def too_large(max_body_bytes: int) -> Refusal:
    """Return the refusal of a body that is too large."""
    return Refusal(
        413,
        f"the request body is larger than {max_body_bytes} bytes (--max-body-bytes)",
        "invalid_request_error",
        "body_too_large",
    )


def overloaded(retry_after_s: int, why: str, limit: str = "") -> Refusal:
    """Return the refusal of a request for which there is no room now, by the flag `limit`."""
    named = f" ({limit})" if limit else ""
    return Refusal(
        429,
        f"{why}{named}; try again in {retry_after_s} s",
        "rate_limit_error",
        "rate_limit_exceeded",
        retry_after_s,
        limit,
    )
