"""Metrics of tool call parsing: attempts and results, counted like vLLM, once for an
answer, or for each event of a stream. Counts are words of a detokenizer's slot."""

from collections.abc import Iterator
from itertools import product

from headrace.ipc.messages import Api

MODES = ("non_streaming", "streaming")
OUTCOMES = ("no_tool_call", "tool_call")
REQUEST_TYPES = ("chat_completions", "responses", "other")
TYPE_OF = {Api.CHAT: "chat_completions", Api.RESPONSES: "responses"}
READINGS = list(product(MODES, OUTCOMES, REQUEST_TYPES))


def reading_of(api: Api, streams: bool, calls: bool) -> int:
    """Return the place of a reading among `READINGS`."""
    return READINGS.index((MODES[streams], OUTCOMES[calls], TYPE_OF.get(api, "other")))


def labeled() -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each place, and its labels."""
    for place, reading in enumerate(READINGS):
        yield place, dict(zip(("mode", "outcome", "request_type"), reading, strict=True))
