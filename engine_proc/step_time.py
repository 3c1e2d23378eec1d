"""How long a step takes, learned from those that were. Pure: the clock is the caller's."""

DECAY = 0.95  # per step: the last twenty count most
PATIENCE_S, PATIENCE = 4.0, 10  # this much longer than so many such steps is far too long
MIN_CHUNK = 32  # tokens of prompt a step computes in any case, so that prompts come to an end


class StepTime:
    """Fits seconds = base + slope * tokens by least squares, old steps fading."""

    def __init__(self) -> None:
        self._weight = self._n = self._t = self._nn = self._nt = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in one step."""
        self._weight = DECAY * self._weight + 1
        self._n = DECAY * self._n + num_tokens
        self._t = DECAY * self._t + seconds
        self._nn = DECAY * self._nn + num_tokens * num_tokens
        self._nt = DECAY * self._nt + num_tokens * seconds

    def tokens_within(self, seconds: float, limit: int) -> int:
        """Return how many tokens a step of at most `seconds` computes, up to `limit`."""
        if self._weight == 0:
            return limit
        base, slope = self._fit()
        if slope <= 0:
            return limit
        return max(MIN_CHUNK, int(min(limit, (seconds - base) / slope)))

    def patience_s(self, num_tokens: int) -> float | None:
        """Return how long a step may take before it is far too long; None before any is known."""
        if self._weight == 0:
            return None
        base, slope = self._fit()
        return PATIENCE_S + PATIENCE * (base + max(slope, 0.0) * num_tokens)

    def _fit(self) -> tuple[float, float]:
        mean_n, mean_t = self._n / self._weight, self._t / self._weight
        variance = self._nn / self._weight - mean_n * mean_n
        if variance < 1:  # steps of one size say nothing about a base
            return 0.0, mean_t / mean_n
        slope = (self._nt / self._weight - mean_n * mean_t) / variance
        return max(0.0, mean_t - slope * mean_n), slope
