"""Finds the sequence that crashes workers. Pure.

All sequences of a step at which a worker died become suspects. A suspect runs alone until it has
computed the tokens of that step. Running alone at two deaths, it is deadly and is failed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.sequence import Sequence

MAX_BLAMED = 2  # deaths at which a sequence was alone


@dataclass(slots=True)
class Suspicion:
    """The evidence against one sequence."""

    until: int = 0  # it has this many computed tokens
    num_blamed: int = 0


class CrashSuspects:
    """The suspects, in the order in which they run alone."""

    def __init__(self) -> None:
        self._all: dict[Sequence, Suspicion] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all)

    def accuse(self, chunks: Iterable[Chunk]) -> Sequence | None:
        """Suspect the sequences of steps at which a worker died; return one that is deadly.

        A sequence that has ended since counts as a member of its step, but is no suspect.
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
        """Acquit a sequence that has computed the tokens it was suspected for."""
        suspicion = self._all.get(sequence)
        if suspicion is not None and sequence.num_computed >= suspicion.until:
            del self._all[sequence]

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        self._all.pop(sequence, None)
