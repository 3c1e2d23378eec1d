"""Stages of a request in this process: texts to encode, their ids, the outcome.

A handler is a generator: it yields texts and is sent their ids, as often as it needs to, and
returns an outcome. So the caller can encode the texts of many requests at once. A handler may
also yield a `Check`, and is resumed when that has been made. A handler that needs no ids may
be a plain function.
"""

from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from headrace.errors import RequestError
from headrace.ipc.messages import GenerateRequest, HttpRequest
from headrace.response_bodies.errors import (
    anthropic_error,
    cohere_error,
    jina_error,
    openai_error,
)
from headrace.routes import ANTHROPIC_PATHS, COHERE_PATHS, JINA_PATHS

T = TypeVar("T")
Body = bytes | memoryview
Ids = memoryview  # of u32: token ids stay bytes on their way to the engine


class Text(NamedTuple):
    """A text to encode, with special tokens around it or without."""

    text: str
    add_special_tokens: bool
    ids: Ids | None = None  # where it is encoded already
    pieces: tuple[str, ...] = ()  # of it, where no token may span two of them


@dataclass(eq=False, slots=True)
class Check(Generic[T]):
    """A check that runs elsewhere."""

    found: T | None = None  # what came of it; set once


@dataclass(frozen=True)
class ImmediateResponse:
    """A whole response, or the beginning of a stream of events."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: list[tuple[str, str]] = field(default_factory=list)
    is_open: bool = False  # more of it follows


@dataclass(frozen=True)
class Sequences:
    """Messages for the engine: one message and one prompt per sequence."""

    requests: list[GenerateRequest]
    prompts: list[Ids]


Outcome = ImmediateResponse | Sequences
Encoding = Generator[list[Text] | Check[Any], list[Ids], T]  # needs texts encoded to return a T
Stages = Encoding[Outcome]
Handler = Callable[[HttpRequest, Body], Stages | ImmediateResponse]


def ids_of(numbers: list[int]) -> Ids:
    """Return token ids as a u32 buffer."""
    return memoryview(array("I", numbers))


def error_response(error: RequestError, path: str) -> ImmediateResponse:
    """Return an error in OpenAI's shape, or in that of the API whose path it is."""
    if path.startswith(ANTHROPIC_PATHS):
        body = msgspec.json.encode(anthropic_error(error))
    elif path in COHERE_PATHS:
        body = msgspec.json.encode(cohere_error(error))
    elif path in JINA_PATHS:
        body = msgspec.json.encode(jina_error(error))
    else:
        body = msgspec.json.encode(openai_error(error))
    return ImmediateResponse(error.status, body, headers=error.headers)


def json_response(body: msgspec.Struct) -> ImmediateResponse:
    """Return a struct of `headrace.response_bodies` or another as a JSON response."""
    return ImmediateResponse(200, msgspec.json.encode(body))
