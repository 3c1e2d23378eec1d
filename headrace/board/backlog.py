"""Backlogs: messages sent to a process and not yet handled, by counters on the board."""

from collections.abc import Callable

from headrace.board.board import MESSAGES_SENT, Board, Slot
from headrace.board.fields import DetokenizerField, EngineField, FrontendField, TokenizerField


class Backlog:
    """Messages sent to a process, less those that it has handled.

    Senders count before they send. A death makes the counts wrong: messages in flight are lost.
    The receiver corrects them when it starts and after a long idle time.

    Args:
        senders: all that may send.
        active: returns those that do, another list once others do; else all do. Vacant seats are
            not read at each look: these are pages of memory that nothing else reads.
    """

    def __init__(
        self,
        senders: list[Slot],
        sent: int,
        receiver: Slot,
        taken: int,
        active: Callable[[], list[Slot]] | None = None,
    ) -> None:
        self._senders = senders
        self._active = active or (lambda: senders)
        self._looked_for: list[Slot] = []
        self._others = 0  # messages of senders that have left
        self._sent = sent
        self._receiver = receiver
        self._taken = taken
        self._looked_at = -1

    def __call__(self) -> int:
        return self._total() - self._receiver[self._taken]

    def settle(self) -> None:
        """Count all sent messages as handled. For the receiver alone."""
        self._receiver[self._taken] = self._total()

    def settle_idle(self) -> None:
        """Settle if nothing was sent since the last call: later messages are lost.

        For the receiver, when nothing has come for a while. A machine that stood still may have it
        wait in vain, and deliver in the next moment what was sent meanwhile.
        """
        total = self._total()
        if total == self._looked_at:
            self._receiver[self._taken] = total
        self._looked_at = total

    def _total(self) -> int:
        sent, active = self._sent, self._active()
        if active is not self._looked_for:
            self._looked_for = active
            self._others = sum([slot[sent] for slot in self._senders if slot not in active])
        return self._others + sum([slot[sent] for slot in active])


def tokenizer_backlog(board: Board, index: int) -> Backlog:
    """Return how many bytes of bodies a tokenizer has still to handle, each counted as one more."""
    senders, receiver = list(board.of("frontend")), board.slot("tokenizer", index)
    return Backlog(
        senders, FrontendField.FORWARDED_BYTES + index, receiver, TokenizerField.HANDLED_BYTES
    )


def engine_backlog(board: Board, index: int) -> Backlog:
    """Return how many tokens of prompts an engine has still to take."""
    senders, receiver = list(board.of("tokenizer")), board.slot("engine", index)
    return Backlog(senders, TokenizerField.SENT_TOKENS + index, receiver, EngineField.TAKEN_TOKENS)


def detokenizer_backlog(board: Board, index: int) -> Backlog:
    """Return how many steps a detokenizer has still to handle."""
    receiver = board.slot("detokenizer", index)
    return Backlog(
        list(board.of("engine")),
        MESSAGES_SENT + index,
        receiver,
        DetokenizerField.MESSAGES_TAKEN,
        lambda: board.seated_engines,
    )


def frontend_backlog(board: Board, index: int) -> Backlog:
    """Return how many messages a frontend has still to handle."""
    senders = [*board.of("tokenizer"), *board.of("detokenizer")]
    receiver = board.slot("frontend", index)
    return Backlog(senders, MESSAGES_SENT + index, receiver, FrontendField.MESSAGES_TAKEN)
