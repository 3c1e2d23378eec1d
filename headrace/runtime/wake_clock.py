"""Since when a watching process has been awake. Pure: the clock is the caller's."""

GAP_S = 2.0  # between looks: a watcher that looks more rarely was itself not running


class WakeClock:
    """The looks of a watcher.

    A machine that stands still stops hearts and watchers alike: silence counts from where the
    watcher was awake.
    """

    def __init__(self) -> None:
        self._looked_ns = 0
        self._since_ns = 0

    def look(self, now_ns: int) -> int:
        """Sample the clock; return since when it has been sampled often, by the same clock."""
        if now_ns - self._looked_ns > GAP_S * 1e9:
            self._since_ns = now_ns
        self._looked_ns = now_ns
        return self._since_ns
