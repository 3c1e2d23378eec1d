"""Limits the tokens of a step after a step ran out of memory. Pure."""

HOLD_STEPS = 64  # that work before a larger one is tried
MAX_HOLD_STEPS = 4096


class OomBackoff:
    """Halves the token budget at each failure, and doubles it after many steps without one.

    A size that soon fails again is retried at growing intervals.
    """

    def __init__(self) -> None:
        self.num_tokens: int | None = None  # None is no limit
        self._too_many = 0  # the most that there was no memory for
        self._hold = HOLD_STEPS
        self._num_worked = 0

    def failed(self, num_tokens: int) -> None:
        """Record a step that ran out of memory."""
        if self.num_tokens is not None:
            num_tokens = min(num_tokens, self.num_tokens)
            self._hold = min(2 * self._hold, MAX_HOLD_STEPS)
        self._too_many = max(self._too_many, num_tokens)
        self.num_tokens = max(1, num_tokens // 2)
        self._num_worked = 0

    def worked(self) -> None:
        """Record a step that was computed."""
        if self.num_tokens is None:
            return
        self._num_worked += 1
        if self._num_worked < self._hold:
            return
        self._num_worked = 0
        self.num_tokens *= 2
        if self.num_tokens >= self._too_many:
            self.num_tokens = None
