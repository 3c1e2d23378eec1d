"""Predicts step times from measured ones. Pure: the caller has the clock."""

import math
from typing import NamedTuple

DECAY = 0.95  # per step of its kind: the last twenty count most
PATIENCE_S, PATIENCE = 4.0, 10  # this much longer than so many such steps is far too long
MIN_CHUNK = 32  # tokens of prompt a step computes in any case, so that prompts come to an end


class Sums(NamedTuple):
    """Sums over steps: weight, tokens, seconds, tokens squared, tokens times seconds."""

    weight: float
    n: float
    t: float
    nn: float
    nt: float


NOTHING = Sums(0.0, 0.0, 0.0, 0.0, 0.0)


class StepTimeModel:
    """Fits seconds = base + slope * tokens by least squares; old steps fade.

    Steps with prompts and steps without fade separately, so the time of a prompt stays known after
    many decodes.
    """

    def __init__(self) -> None:
        self._sums: dict[bool, Sums] = {}  # of steps without prompts, and with

    def observe(self, num_tokens: int, seconds: float, num_sequences: int = 1) -> None:
        """Record one step of `num_tokens`. Each of `num_sequences` decodes has one token in it."""
        has_prompts, n = num_tokens > num_sequences, float(num_tokens)
        weight, sum_n, sum_t, sum_nn, sum_nt = self._sums.get(has_prompts, NOTHING)
        self._sums[has_prompts] = Sums(
            DECAY * weight + 1,
            DECAY * sum_n + n,
            DECAY * sum_t + seconds,
            DECAY * sum_nn + n * n,
            DECAY * sum_nt + n * seconds,
        )

    def tokens_within(self, seconds: float, limit: int) -> int:
        """Return how many tokens a step of at most `seconds` computes, up to `limit`."""
        if not self._sums:
            return limit
        base, slope = self._fit()
        if slope <= 0:
            return limit
        return max(MIN_CHUNK, int(min(limit, (seconds - base) / slope)))

    def patience_s(self, num_tokens: int) -> float | None:
        """Return how long a step may take before it is far too long; None before any is known."""
        if not self._sums:
            return None
        base, slope = self._fit()
        return PATIENCE_S + PATIENCE * (base + max(slope, 0.0) * num_tokens)

    def prompt_s(self, num_tokens: int, step_tokens: int) -> float:
        """Return how long a prompt takes alone; infinity before any step is known.

        Args:
            step_tokens: the most that a step has.
        """
        if not self._sums:
            return math.inf
        base, slope = self._fit()
        return -(-num_tokens // step_tokens) * base + max(slope, 0.0) * num_tokens

    def mean_s(self, num_tokens: int, num_sequences: int) -> float:
        """Return how long steps of the kind of one have taken; infinity before any is known."""
        sums = self._sums.get(num_tokens > num_sequences)
        return math.inf if sums is None else sums.t / sums.weight

    def _fit(self) -> tuple[float, float]:
        weight, n, t, nn, nt = map(sum, zip(*self._sums.values(), strict=True))
        mean_n, mean_t = n / weight, t / weight
        variance = nn / weight - mean_n * mean_n
        if variance < 1:  # steps of one size say nothing about a base
            return 0.0, mean_t / mean_n
        slope = (nt / weight - mean_n * mean_t) / variance
        return max(0.0, mean_t - slope * mean_n), slope
