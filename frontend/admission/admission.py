"""Admission control, decided before a body is read, from numbers on the board. Pure.

A request that would wait too long is rejected at once. It gets a 429, with a `Retry-After` from the
measured drain rate.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from headrace.frontend.http.rejections import Rejection, overloaded

MAX_REQUESTS, MAX_TOKENS = "--max-num-queued", "--max-queued-tokens"
SHORTEST_S = 1
LONGEST_S = 60
UNKNOWN_S = 5  # to wait where nothing has been done yet
MEMORY_S = 10.0  # over which rates are averaged


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits of the server. 0 is no limit."""

    num_waiting_tokens: int  # to compute for waiting sequences
    num_body_bytes: int  # of requests that are not answered, or being read


class Load(NamedTuple):
    """The present load of the server."""

    num_requests: int
    num_waiting_tokens: int
    num_body_bytes: int
    max_num_requests: int  # its limit, which is that of the engines there are; 0 is none


class DrainRate:
    """Recent rate of a counter, per second."""

    def __init__(self) -> None:
        self._total = 0
        self._at: float | None = None
        self.per_s = 0.0

    def observe(self, total: int, now: float) -> None:
        """Sample the counter; called periodically."""
        if self._at is not None and now > self._at:
            elapsed_s = now - self._at
            weight = min(1.0, elapsed_s / MEMORY_S)
            self.per_s += weight * ((total - self._total) / elapsed_s - self.per_s)
        self._total, self._at = total, now

    def seconds_for(self, amount: int) -> int:
        """Return in how many seconds so much is done, as a `Retry-After`."""
        if self.per_s <= 0:
            return UNKNOWN_S
        return min(max(ceil(amount / self.per_s), SHORTEST_S), LONGEST_S)


class Admission:
    """Admission control. `requests` and `tokens` are the engine's drain rates."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.requests = DrainRate()
        self.tokens = DrainRate()

    def refuse(self, load: Load, length: int) -> Rejection | None:
        """Return why a request with a body of `length` bytes cannot be taken now, or None.

        A client that returns after Retry-After finds the queue half empty, at the present rate.
        """
        limits = self._limits
        if 0 < load.max_num_requests <= load.num_requests:
            excess = load.num_requests - load.max_num_requests // 2
            return overloaded(
                self.requests.seconds_for(excess),
                "too many requests are waiting",
                MAX_REQUESTS,
            )
        if limits.num_waiting_tokens and load.num_waiting_tokens >= limits.num_waiting_tokens:
            excess = load.num_waiting_tokens - limits.num_waiting_tokens // 2
            return overloaded(
                self.tokens.seconds_for(excess),
                "too many prompt tokens are waiting",
                MAX_TOKENS,
            )
        return self.refuse_body(load.num_body_bytes, length)

    def refuse_body(self, num_other_bytes: int, length: int) -> Rejection | None:
        """Return why a body of `length` bytes cannot be taken beside others, or None.

        One body is always taken: it is within --max-body-bytes.
        """
        if num_other_bytes and num_other_bytes + length > self._limits.num_body_bytes > 0:
            return overloaded(
                SHORTEST_S, f"request bodies of {num_other_bytes} bytes are being worked on"
            )
        return None
