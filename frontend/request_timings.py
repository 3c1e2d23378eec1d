"""Durations of a request between the parts of the ring."""

from itertools import pairwise

from headrace.board.board import Counts, Timing
from headrace.ipc.messages import Times

SPANS = (
    Timing.ACCEPT,
    Timing.PARSE,
    Timing.TOKENIZE,
    Timing.SUBMIT,
    Timing.QUEUE,
    Timing.PREFILL,
    Timing.RENDER,
)


class RequestTimings:
    """Durations of one request up to its first token, in ns."""

    def __init__(self, received_at: int, times: Times) -> None:
        """`received_at` is when the head was read, CLOCK_MONOTONIC, ns."""
        marks = (
            received_at,
            times.begun,
            times.parsed,
            times.tokenized,
            times.queued,
            times.scheduled,
            times.first_token,
            times.rendered,
        )
        self._durations = [end - start for start, end in pairwise(marks)]  # in the order of SPANS
        self._first_token_ns = times.rendered - received_at

    def observe(self, counts: Counts) -> None:
        """Count all spans."""
        histograms = counts.histograms
        for span, duration_ns in zip(SPANS, self._durations, strict=True):
            histograms[span].observe(duration_ns)
        counts.histogram(Timing.FIRST_TOKEN).observe(self._first_token_ns)

    def header(self) -> bytes:
        """Return the value of `Server-Timing`, in ms (https://www.w3.org/TR/server-timing/)."""
        named = zip(SPANS, self._durations, strict=True)
        entries = [f"{span.name.lower()};dur={ns / 1e6:.3f}" for span, ns in named]
        return ", ".join(entries).encode("ascii")
