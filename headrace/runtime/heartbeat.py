"""Heartbeats during long pieces of work, such as a load or a compilation.

A helper thread beats, since native code may block the working thread. Each piece has a time limit,
after which beats stop and the process is replaced, so a hang is still found. Loading a model has no
limit while it makes progress.
"""

import logging
import math
import threading
import time
from collections.abc import Callable

from headrace.board.board import Slot

BEAT_S = 0.5
MAX_WORK_S = 300.0  # of a step or a long prompt; vLLM's and SGLang's watchdogs wait as long

log = logging.getLogger(__name__)


class Heartbeat:
    """Writes the process's heartbeat to the board."""

    def __init__(self, slot: Slot, clock: Callable[[], float] = time.monotonic) -> None:
        self._slot = slot
        self._clock = clock
        self._began_at: float | None = None
        self._progress: Callable[[], object] | None = None
        self._reached: object = None
        self._reached_at = -math.inf

    def start(self) -> None:
        """Beat from now on."""
        threading.Thread(target=self._run, name="heart", daemon=True).start()

    def begin(self, progress: Callable[[], object] | None = None) -> None:
        """Note that a piece of work begins.

        Args:
            progress: how far it is; each time that changes the piece counts as begun anew.
        """
        self._progress = progress
        self._began_at = self._clock()

    def end(self) -> None:
        """Note that it is done."""
        self._began_at = self._progress = None

    def beat(self) -> bool:
        """Beat, or return that the work takes too long."""
        began_at, progress = self._began_at, self._progress
        if progress is not None and (reached := progress()) != self._reached:
            self._reached, self._reached_at = reached, self._clock()
        if began_at is not None and self._clock() - max(began_at, self._reached_at) > MAX_WORK_S:
            return False
        self._slot.beat()
        return True

    def _run(self) -> None:
        has_beaten = True
        while True:
            beats = self.beat()
            if has_beaten and not beats:
                log.error("at one piece of work for more than %g s; its heart stops", MAX_WORK_S)
            has_beaten = beats
            time.sleep(BEAT_S)
