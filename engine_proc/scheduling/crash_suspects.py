"""With whom workers die. Pure.

Whoever was in a step that workers did not survive runs alone until it is past that place. Who is
alone there when workers die, twice, is deadly; all others go on with whom they were.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.sequence import Sequence

MAX_BLAMED = 2  # deaths at which a sequence was alone


@dataclass(slots=True)
class Suspicion:
    """What there is against a sequence."""

    until: int = 0  # it has this many computed tokens
    num_blamed: int = 0


class CrashSuspects:
    """Sequences that have still to show that they are harmless, in the order of their turns."""

    def __init__(self) -> None:
        self._all: dict[Sequence, Suspicion] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all)

    def accuse(self, chunks: Iterable[Chunk]) -> Sequence | None:
        """Take note of who was in steps at which workers died; return one that is deadly.

        Who has ended since was there, too, and is not suspected any more.
        """
        ends: dict[Sequence, int] = {}
        for chunk in chunks:
            ends[chunk.sequence] = max(chunk.end, ends.get(chunk.sequence, 0))
        for sequence, end in ends.items():
            if not sequence.has_ended:
                suspicion = self._all.setdefault(sequence, Suspicion())
                suspicion.until = max(suspicion.until, end)
                suspicion.num_blamed += len(ends) == 1
                if suspicion.num_blamed == MAX_BLAMED:
                    return sequence
        return None

    def look(self, sequence: Sequence) -> None:
        """Let go of one that is past the place where it was suspected."""
        suspicion = self._all.get(sequence)
        if suspicion is not None and sequence.num_computed >= suspicion.until:
            del self._all[sequence]

    def forget(self, sequence: Sequence) -> None:
        """Let go of one that has ended."""
        self._all.pop(sequence, None)
