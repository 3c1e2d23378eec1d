"""Links to the engines. Each is made when it is first used: a seat may be vacant for ever."""

from collections.abc import Callable, Sequence
from functools import partial

from headrace.board.board import Board, Slot
from headrace.board.fields import EngineField, Seating
from headrace.ipc.messages import Message
from headrace.ipc.sockets import Frame, Outbox, address


class EngineLeft(Exception):
    """An engine has left its seat while a sender waited for it."""


class EngineLinks:
    """The links of one sender to the engines of a server.

    Args:
        on_wait: as `Outbox` has it.
    """

    def __init__(
        self, run_dir: str, board: Board, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        self._run_dir = run_dir
        self._board = board
        self._on_wait = on_wait
        self._outboxes: dict[int, Outbox] = {}
        self._seated: list[Slot] = []  # at the last look
        self._present: list[int] = []

    def __getitem__(self, engine: int) -> Outbox:
        """Return the link to an engine."""
        found = self._outboxes.get(engine)
        if found is None:
            where = address(self._run_dir, "engine", engine)
            on_wait = partial(self._wait_for, engine)
            found = self._outboxes[engine] = Outbox(where, on_wait=on_wait)
        return found

    def _wait_for(self, engine: int) -> None:
        """Note that a link is full.

        Raises:
            EngineLeft: no engine will read it.
        """
        self._on_wait()
        if self._board.slot("engine", engine)[EngineField.SEATING] == Seating.VACANT:
            raise EngineLeft

    def send(self, engine: int, messages: Sequence[tuple[Message, Frame]]) -> None:
        """Send messages as one, waiting while the link is full.

        They are lost where the engine leaves meanwhile. That is a death, after which senders of
        requests send them again.
        """
        try:
            self[engine].send_all(messages)
        except EngineLeft:
            self._outboxes.pop(engine).close()

    @property
    def present(self) -> list[int]:
        """The engines that have a seat, or end. Other links are dropped, with what waits there."""
        seated = self._board.seated_engines
        if seated is not self._seated:
            self._seated = seated
            self._present = [slot.seat.index for slot in seated]
        for engine in self._outboxes.keys() - self._present:  # some have been made since
            self._outboxes.pop(engine).close()
        return self._present

    def close(self) -> None:
        """Drop all links."""
        for outbox in self._outboxes.values():
            outbox.close()
        self._outboxes.clear()
