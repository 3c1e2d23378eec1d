"""How fast an engine computes prompts, for the routers of tokenizers."""

from collections.abc import Callable

from headrace.board.board import Slot
from headrace.board.fields import EngineField

DECAY = 0.95  # per step that is measured: the last twenty count most
MIN_TOKENS = 256  # of a step: below it takes the time of a pass over the weights
MAX_AGE_S = 10.0  # an engine that was slow gets no prompts, and would never be measured again


class PrefillRate:
    """Tokens per second of steps that compute prompts, on the board.

    A step counts by the square of its tokens, so large ones count most.
    """

    def __init__(self, slot: Slot, clock: Callable[[], float]) -> None:
        self._slot = slot
        self._clock = clock
        self._squared_tokens = self._token_seconds = 0.0  # sums, which fade
        self._observed_at = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Note a step that has computed prompts, and what else was in it."""
        if num_tokens < MIN_TOKENS:
            return
        self._observed_at = self._clock()
        self._squared_tokens = DECAY * self._squared_tokens + num_tokens * num_tokens
        self._token_seconds = DECAY * self._token_seconds + num_tokens * seconds
        if self._token_seconds:
            rate = self._squared_tokens / self._token_seconds
            self._slot[EngineField.PREFILL_RATE] = max(1, round(rate))

    def expire(self) -> None:
        """Forget what was measured too long ago."""
        if self._token_seconds and self._clock() - self._observed_at >= MAX_AGE_S:
            self._squared_tokens = self._token_seconds = 0.0
            self._slot[EngineField.PREFILL_RATE] = 0
