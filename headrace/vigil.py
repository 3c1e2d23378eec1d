"""Who has been silent for so long that only its end can help. Pure: the clock is the caller's."""

from headrace.board import Field, Slot, State

STARTING_S = 120.0  # of one that does not serve yet; who is long at it beats meanwhile (`heart.py`)
GAP_S = 2.0  # between looks: a watcher that looks more rarely was itself not running


class Vigil:
    """A watch over processes, by their heartbeats.

    Args:
        stuck_s: for how long one that serves may be silent, in seconds.
    """

    def __init__(self, stuck_s: float) -> None:
        self._stuck_s = stuck_s
        self._looked_ns = 0
        self._since_ns = 0  # nobody was watched before

    def stuck(self, slots: list[Slot], now_ns: int) -> list[Slot]:
        """Return who is stuck, of processes that live; to be called often.

        A machine that stands still stops hearts and watchers alike: silence counts from where the
        watcher was awake.
        """
        if now_ns - self._looked_ns > GAP_S * 1e9:
            self._since_ns = now_ns
        self._looked_ns = now_ns
        return [slot for slot in slots if self._silent_s(slot, now_ns) > self._patience_s(slot)]

    def _silent_s(self, slot: Slot, now_ns: int) -> float:
        return (now_ns - max(slot[Field.HEARTBEAT_NS], self._since_ns)) / 1e9

    def _patience_s(self, slot: Slot) -> float:
        return patience_s(slot, self._stuck_s)


def patience_s(slot: Slot, stuck_s: float) -> float:
    """Return for how long a process may be silent."""
    return stuck_s if slot[Field.STATE] == State.READY else max(STARTING_S, stuck_s)
