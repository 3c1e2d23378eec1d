"""How long a step may take while streams are silent that a death has interrupted. Pure."""

from headrace.engine_proc.sequence.sequence import Sequence

RESUME_ITL_S = 0.5  # the target while they are computed again
RESUME_S = 5.0  # since the last one came: that may wait for a place


class InterruptedStreams:
    """Sequences that go on after tokens of another engine, until they have been computed again."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._until = 0.0

    def add(self, sequence: Sequence, now: float) -> None:
        """Take one that will be computed again."""
        if now > self._until:
            self._sequences.clear()
        self._sequences.append(sequence)
        self._until = now + RESUME_S

    def target_s(self, target_s: float, now: float) -> float:
        """Return the target time between tokens, which is `target_s` at other times."""
        self._sequences = [
            sequence
            for sequence in self._sequences
            if sequence.is_prefilling and not sequence.has_ended and now <= self._until
        ]
        return max(target_s, RESUME_ITL_S) if self._sequences else target_s
