"""The monitor of the ring: its state, its deaths and its last hour, as server-sent events."""

import time
from collections.abc import Callable

from headrace import sse
from headrace.board.board import Board
from headrace.config.process_configs import TokenizerConfig
from headrace.tokenizer_proc.ring.death_watch import DeathWatch
from headrace.tokenizer_proc.ring.history import History, HistoryNews, HourHistory
from headrace.tokenizer_proc.ring.ring_state import RingReader, RingState

CONTENT_TYPE = "text/event-stream"
RingEvent = HourHistory | RingState | HistoryNews


class RingMonitor:
    """Makes events: `history` at the beginning of a stream, then `ring`, and `point` now and then.

    The work of an event is done once for all streams.
    """

    def __init__(
        self, board: Board, config: TokenizerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` returns seconds and never goes back."""
        self._deaths = DeathWatch(board)
        self._reader = RingReader(board, config, self._deaths)
        self._clock = clock
        self._history = History(board, clock())

    def state(self) -> RingState:
        """Return the state of the ring now."""
        self._deaths.look()
        return self._reader.read()

    def opening(self) -> bytes:
        """Return the events with which a stream begins."""
        return event(self._history.hour()) + event(self.state())

    def events(self, are_wanted: bool) -> bytes:
        """Look at the board, every second or so; return the events for open streams.

        Args:
            are_wanted: whether there is a stream; else nothing is encoded.
        """
        self._deaths.look()
        now = self._clock()
        news = b""
        if now >= self._history.due_at:
            point = self._history.add(now, time.time())
            if are_wanted:
                news = event(HistoryNews(point, self._history.distributions()))
        return news + event(self._reader.read()) if are_wanted else b""


def event(data: RingEvent) -> bytes:
    """Return one server-sent event; its type is the tag of its struct."""
    name = str(data.__struct_config__.tag)
    return sse.event(data, name)
