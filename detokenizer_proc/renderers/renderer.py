"""The interface of renderers, shared by all API dialects."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from headrace.detokenizer_proc.parsers.pieces import Call, Piece
from headrace.detokenizer_proc.renderers.json_slices import LazyList
from headrace.errors import RequestError
from headrace.ipc.messages import FinishReason
from headrace.response_bodies.logprobs import ChatCompletionLogProbs, CompletionLogProbs

EVENT_STREAM = "text/event-stream; charset=utf-8"
JSON = "application/json"

Object = dict[str, Any]
Logprobs = ChatCompletionLogProbs | CompletionLogProbs | Object  # columns of `/generate`


class TokenUsage(NamedTuple):
    """Token counts of a request."""

    num_prompt: int
    num_completion: int
    num_cached: int  # of the prompt, found in the prefix cache
    num_thought: int | None = None  # of the completion; None where no thoughts are looked for


class Choice(NamedTuple):
    """A whole answer, one of `n`."""

    text: str
    finished: FinishReason
    logprobs: Logprobs | None = None
    prompt_logprobs: LazyList | Object | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: "array[int] | None" = None
    thought: str = ""
    calls: Sequence[Call] = ()
    stopped_by: str | int | None = None  # the stop string, or the stop token
    usage: TokenUsage | None = None  # of this answer alone


class Choices(Protocol):
    """A list of `Choice`, possibly created on access."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> Choice: ...
    def __iter__(self) -> Iterator[Choice]: ...


class Renderer(Protocol):
    """Renders one response, whose sequences share a plan but for their index."""

    @property
    def content_type(self) -> str:
        """The content type of the response."""
        ...

    def opening(
        self, index: int, usage: TokenUsage | None = None, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """Return a sequence's first events."""
        ...

    def delta(
        self,
        index: int,
        pieces: list[Piece],
        finished: FinishReason | None,
        logprobs: Logprobs | None = None,
        usage: TokenUsage | None = None,
        token_ids: list[int] | None = None,
        stopped_by: str | int | None = None,
    ) -> bytes:
        """Return the events of new text or tokens, of the end, or of both.

        `usage` is the sequence's so far, where every event has it; `stopped_by` is the stop string
        or the stop token, in the last.
        """
        ...

    def closing(self, usage: TokenUsage) -> bytes:
        """Return the last events of a stream."""
        ...

    def whole(self, choices: Choices, usage: TokenUsage) -> Iterator[bytes]:
        """Return the body of an answer that does not stream, in slices."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """Return the last events of a stream that fails."""
        ...
