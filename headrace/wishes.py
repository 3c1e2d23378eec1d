"""What operators ask of a running server: a frontend notes it on the board, the supervisor looks.

Counters only grow, so nothing is lost when either of them is busy or replaced.
"""

from headrace.board import Board, Field, Slot

RENEWABLE = ("frontend", "tokenizer", "detokenizer")  # one after the other, unnoticed
STOP = "drain"
WISHES = (STOP, *RENEWABLE)  # to stop when all is answered, or to renew the processes of a role


def wish(slot: Slot, what: str) -> None:
    """Note one of `WISHES`; for the slot's owner."""
    slot.add(Field.WISHES + WISHES.index(what))


class Wishes:
    """What has been asked for since the last look."""

    def __init__(self, board: Board) -> None:
        self._slots = list(board.of("frontend"))
        self._counts = self._read()

    def _read(self) -> list[int]:
        places = range(Field.WISHES, Field.WISHES + len(WISHES))
        return [sum(slot[place] for slot in self._slots) for place in places]

    def take(self) -> list[str]:
        """Return the wishes that are new, each once."""
        before, self._counts = self._counts, self._read()
        return [w for w, a, b in zip(WISHES, before, self._counts, strict=True) if a != b]
