"""When a tokenizer process loads what makes encoding fast: while no request shares its cores."""

import threading
import time
from collections.abc import Callable

from headrace.board.board import Board
from headrace.board.fields import EngineField

QUIET_S = 2.0  # without a request: the first one often comes the moment that `/health` is 200
LATEST_S = 10.0  # after the server is up, steps or none
POLL_INTERVAL_S = 0.5  # between looks at the board, which takes longer the more seats it has


class FastLoader:
    """Loads in a thread, once. Until then requests are encoded slowly, with the same ids.

    Args:
        load: takes a second of a core.
    """

    def __init__(
        self, load: Callable[[], None], board: Board, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._load = load
        self._board = board
        self._clock = clock
        self._latest: float | None = None  # known once the server is up
        self._quiet_since = 0.0
        self._look_at = 0.0
        self.thread: threading.Thread | None = None

    def poll(self, is_busy: bool) -> None:
        """Begin to load, if it is time. The server is not to start later for it.

        Args:
            is_busy: whether the process has just handled requests.
        """
        if self.thread is not None:
            return
        now = self._clock()
        if is_busy:
            self._quiet_since = now
            if now < self._look_at:
                return
        self._look_at = now + POLL_INTERVAL_S
        if self._board.unhealthy():
            return
        if self._latest is None:
            self._latest, self._quiet_since = now + LATEST_S, now
        if self._has_sequences():
            self._quiet_since = now
        if now - self._quiet_since >= QUIET_S or now >= self._latest:
            self.thread = threading.Thread(target=self._load, name="loader")
            self.thread.start()

    def _has_sequences(self) -> bool:
        fields = EngineField.RUNNING, EngineField.WAITING
        return any(slot[field] for slot in self._board.seated_engines for field in fields)
