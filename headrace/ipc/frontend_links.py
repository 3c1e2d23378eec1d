"""Links to the frontends, with the backlog of each."""

from headrace.board.backlog import frontend_backlog
from headrace.board.board import MESSAGES_SENT, Board, Slot
from headrace.ipc.messages import ResponseFrames
from headrace.ipc.sockets import STEP_HIGH_WATER, Frame, Outbox, address


class FrontendLinks:
    """The links of one sender to all frontends."""

    def __init__(self, run_dir: str, num_frontends: int, board: Board, slot: Slot) -> None:
        self._outboxes = [
            Outbox(address(run_dir, "frontend", i), STEP_HIGH_WATER, slot.beat)
            for i in range(num_frontends)
        ]
        self._backlogs = [frontend_backlog(board, i) for i in range(num_frontends)]
        self._slot = slot

    def __len__(self) -> int:
        return len(self._outboxes)

    def backlog(self, frontend: int) -> int:
        """Return how many messages a frontend has been sent, by all senders, and not handled."""
        return self._backlogs[frontend]()

    def send(self, frontend: int, frames: ResponseFrames, data: Frame) -> None:
        """Send a message, waiting while the link is full."""
        self._slot.add(MESSAGES_SENT + frontend)
        self._outboxes[frontend].send(frames, data)

    def close(self) -> None:
        """Drop all links."""
        for outbox in self._outboxes:
            outbox.close()
