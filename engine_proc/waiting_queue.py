"""Who runs next. Pure.

Keys (users) share the engine by service: among sequences of equal rank, the key that has had the
least goes first. With one key, that is first come, first served.
"""

import enum
from collections.abc import Iterator

from headrace.engine_proc.fair_share import FairShare
from headrace.engine_proc.page_pool import PagePool
from headrace.engine_proc.sequence import Sequence

AGE_TOKENS = 16  # of prefix that a step of waiting is worth, with `lpm`


class Policy(enum.StrEnum):
    """What goes before fairness."""

    FCFS = "fcfs"  # nothing
    PRIORITY = "priority"  # the request's priority, the lowest first
    LPM = "lpm"  # the longest prefix in the cache (SGLang), and long waiting


class WaitingQueue:
    """Sequences that wait."""

    def __init__(self, policy: Policy, pool: PagePool, shares: FairShare) -> None:
        self._policy = policy
        self._pool = pool
        self._shares = shares
        self._sequences: list[Sequence] = []
        self.num_tokens = 0  # of all of them, prompts and what preempted ones have generated

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._sequences.append(sequence)
        self.num_tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        self._sequences.remove(sequence)
        self.num_tokens -= len(sequence.tokens)

    @property
    def has_ready(self) -> bool:
        """Whether somebody waits for nothing but a turn."""
        return any(not sequence.is_blocked for sequence in self._sequences)

    def first(self, step: int) -> Sequence | None:
        """Return who runs next, with `step` the number of steps so far, if anybody can."""
        ready = (sequence for sequence in self._sequences if not sequence.is_blocked)
        return min(ready, key=lambda sequence: self._rank(sequence, step), default=None)

    def _rank(self, sequence: Sequence, step: int) -> tuple[int, int, int]:
        served = self._shares.served(sequence.request.key)
        match self._policy:
            case Policy.FCFS:
                return 0, served, sequence.arrival
            case Policy.PRIORITY:
                return sequence.request.priority, served, sequence.arrival
            case Policy.LPM:
                known = self._pool.count_known(sequence.digests) * self._pool.page_tokens
                waited = step - sequence.queued_at
                return -(known + AGE_TOKENS * waited), served, sequence.arrival

    def importance(self, sequence: Sequence) -> tuple[int, int]:
        """Return the order in which running sequences keep their pages, the first for longest."""
        priority = sequence.request.priority if self._policy is Policy.PRIORITY else 0
        return priority, sequence.arrival
