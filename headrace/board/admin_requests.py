"""Admin requests to a running server: a frontend notes them on the board.

The supervisor polls, for profiles the workers, and for a cache of images the process that has it.
Counters only grow, so nothing is lost when either of them is busy or replaced.
"""

from headrace.board.board import Board, Slot
from headrace.board.fields import FrontendField

RENEWABLE = ("frontend", "tokenizer", "detokenizer", "fetcher", "engine")  # one after the other
STOP = "drain"
START_PROFILE, STOP_PROFILE = "start_profile", "stop_profile"
RESET_MM_CACHE, RESET_ENCODER_CACHE = "reset_mm_cache", "reset_encoder_cache"
SUPERVISED = (STOP, *RENEWABLE)  # to stop when all is answered, or to renew a role's processes
PROFILE = (START_PROFILE, STOP_PROFILE)
RESETS = (RESET_MM_CACHE, RESET_ENCODER_CACHE)
WISHES = (*SUPERVISED, *PROFILE, *RESETS)


def admin_request(slot: Slot, what: str) -> None:
    """Note one of `WISHES`; for the slot's owner."""
    slot.add(FrontendField.WISHES + WISHES.index(what))


def note_counts(slot: Slot, what: tuple[str, ...], counts: list[int]) -> None:
    """Note how often each of some `WISHES` has been asked for; for the slot's owner."""
    for one, count in zip(what, counts, strict=True):
        slot[FrontendField.WISHES + WISHES.index(one)] = count


class AdminRequests:
    """Admin requests since the last poll, of the kinds in `heeded`."""

    def __init__(self, board: Board, heeded: tuple[str, ...] = SUPERVISED) -> None:
        self._heeded = heeded
        self._places = [FrontendField.WISHES + WISHES.index(what) for what in heeded]
        self._slots = list(board.of("frontend"))
        self._counts = self.read()

    def read(self) -> list[int]:
        """Return how often each kind has been asked for."""
        return [sum([slot[place] for slot in self._slots]) for place in self._places]

    def take(self) -> list[str]:
        """Return the wishes that are new, each once."""
        before, self._counts = self._counts, self.read()
        if before == self._counts:
            return []
        return [w for w, a, b in zip(self._heeded, before, self._counts, strict=True) if a != b]
