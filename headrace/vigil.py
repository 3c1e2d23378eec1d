"""Who has been silent for so long that only its end can help. Pure: the clock is the caller's."""

from headrace.board import Field, Slot, State

STUCK_S = 8.0
STARTING_S = 120.0  # of one that does not serve yet; who is long at it beats meanwhile (`heart.py`)
GAP_S = 2.0  # between looks: a watcher that looks more rarely was itself not running


class Vigil:
    """A watch over processes, by their heartbeats."""

    def __init__(self) -> None:
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
        return [slot for slot in slots if now_ns - self._heard_ns(slot) > patience_s(slot) * 1e9]

    def _heard_ns(self, slot: Slot) -> int:
        return max(slot[Field.HEARTBEAT_NS], self._since_ns)


def patience_s(slot: Slot) -> float:
    """Return for how long a process may be silent."""
    return STUCK_S if slot[Field.STATE] == State.READY else STARTING_S
