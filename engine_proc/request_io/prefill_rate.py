"""How fast an engine computes prompts, for the routers of tokenizers."""

from headrace.board.board import Slot
from headrace.board.fields import EngineField

DECAY = 0.95  # per step with prompts: the last twenty count most


class PrefillRate:
    """Tokens per second of steps that compute prompts, on the board.

    A step counts by the square of its tokens. Short prompts say little: their steps take the time
    of a pass over the weights.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._squared_tokens = self._token_seconds = 0.0  # sums, which fade

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Note a step that has computed prompts, and what else was in it."""
        self._squared_tokens = DECAY * self._squared_tokens + num_tokens * num_tokens
        self._token_seconds = DECAY * self._token_seconds + num_tokens * seconds
        if self._token_seconds:
            rate = self._squared_tokens / self._token_seconds
            self._slot[EngineField.PREFILL_RATE] = max(1, round(rate))
