"""Backlogs: messages sent to a process and not yet handled, by counters on the board."""

from headrace.board.board import MESSAGES_SENT, Board, Slot
from headrace.board.fields import DetokenizerField, EngineField, FrontendField, TokenizerField


class Backlog:
    """Messages sent to a process, less those that it has handled.

    Senders count before they send. A death makes the counts wrong: messages in flight are lost.
    The receiver corrects them when it starts and after a long idle time.
    """

    def __init__(self, senders: list[Slot], sent: int, receiver: Slot, taken: int) -> None:
        self._senders = senders
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
        sent = self._sent
        return sum([slot[sent] for slot in self._senders])


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
        list(board.of("engine")), MESSAGES_SENT + index, receiver, DetokenizerField.MESSAGES_TAKEN
    )


def frontend_backlog(board: Board, index: int) -> Backlog:
    """Return how many messages a frontend has still to handle."""
    senders = [*board.of("tokenizer"), *board.of("detokenizer")]
    receiver = board.slot("frontend", index)
    return Backlog(senders, MESSAGES_SENT + index, receiver, FrontendField.MESSAGES_TAKEN)
