"""Responses that fail by a script of the mock engine: output that no correct renderer writes."""

from collections.abc import Iterator

from headrace.detokenizer_proc.parsers.pieces import Piece
from headrace.detokenizer_proc.renderers.renderer import Choices, Logprobs, Renderer, TokenUsage
from headrace.errors import RequestError, ScriptedError
from headrace.ipc.messages import FaultKind, FinishReason, ResponseFault

HTML = "text/html; charset=utf-8"
END = b"\n\n"  # of an event


class FaultyRenderer:
    """A `Renderer` that writes as another one, up to the fault at the end of the text."""

    def __init__(self, renderer: Renderer, fault: ResponseFault) -> None:
        self._renderer = renderer
        self._fault = fault

    @property
    def content_type(self) -> str:
        """The content type of the response."""
        return HTML if self._fault.kind is FaultKind.CONTENT_TYPE else self._renderer.content_type

    def opening(
        self, index: int, usage: TokenUsage | None = None, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """Return a sequence's first events."""
        return self._renderer.opening(index, usage, prompt_token_ids)

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
        """Return the events of new text, and at the end the fault."""
        kind, inner = self._fault.kind, self._renderer
        if finished is None or kind in (FaultKind.NO_END, FaultKind.CONTENT_TYPE):
            return inner.delta(index, pieces, finished, logprobs, usage, token_ids, stopped_by)
        events = inner.delta(index, pieces, None, logprobs, usage, token_ids) if pieces else b""
        if kind is FaultKind.ERROR:
            return events + inner.failure(error_of_fault(self._fault))
        end = inner.delta(index, [], finished, None, usage, None, stopped_by)
        return events + (end[: len(end) // 2] if kind is FaultKind.CUT else without_last_half(end))

    def closing(self, usage: TokenUsage) -> bytes:
        """Return the last events of a stream, where the fault leaves some."""
        if self._fault.kind in (FaultKind.ERROR, FaultKind.CUT, FaultKind.NO_END):
            return b""
        return self._renderer.closing(usage)

    def whole(self, choices: Choices, usage: TokenUsage) -> Iterator[bytes]:
        """Return the body of an answer that does not stream, or half of it."""
        if self._fault.kind not in (FaultKind.CUT, FaultKind.JSON):
            return self._renderer.whole(choices, usage)
        body = b"".join(self._renderer.whole(choices, usage))
        return iter([body[: len(body) // 2]])

    def failure(self, error: RequestError) -> bytes:
        """Return the last events of a stream that fails by itself."""
        return self._renderer.failure(error)


def error_of_fault(fault: ResponseFault) -> ScriptedError:
    """Return the error that a stream ends with."""
    return ScriptedError(fault.status, fault.message, fault.type, fault.code)


def without_last_half(events: bytes) -> bytes:
    """Return events, the last one without the second half of its data, so that it is not JSON."""
    *before, last = events.removesuffix(END).split(END)
    return END.join([*before, last[: (last.index(b"data: ") + len(last)) // 2]]) + END
