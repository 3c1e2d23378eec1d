"""How many tokens of prompts an engine on another machine has taken, on the server's board."""

from headrace.board.backlog import Backlog
from headrace.board.board import Slot
from headrace.board.fields import EngineField

IDLE_S = 1.0  # that an engine has nothing to do, between looks at what is lost


class TakenTokens:
    """The counter of a seat: what there was before the session, and what the session adds."""

    def __init__(self, slot: Slot, backlog: Backlog, now: float) -> None:
        """Begin a session; messages that its predecessor left may still come."""
        self._slot = slot
        self._backlog = backlog
        self._idle_since = now
        self._in_session = 0
        backlog.settle()
        self._before = slot[EngineField.TAKEN_TOKENS]

    def take(self, in_session: int) -> None:
        """Note how many tokens the engine has taken in this session."""
        self._in_session = in_session
        self._slot[EngineField.TAKEN_TOKENS] = self._before + in_session

    def settle_idle(self, now: float) -> None:
        """Correct the counter when the engine has had nothing to do for a while.

        What a death has taken along counts as taken; what came late does not count twice. Prompts
        that are on their way do not count: the backlog settles when no other has been sent since
        the last look.
        """
        if self._slot[EngineField.IS_BUSY]:
            self._idle_since = now
        elif now >= self._idle_since + IDLE_S:
            self._idle_since = now
            self._backlog.settle_idle()
            self._before = self._slot[EngineField.TAKEN_TOKENS] - self._in_session
