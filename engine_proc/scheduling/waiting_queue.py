"""The waiting queue: the order in which sequences are admitted. Pure.

API keys (users) share the engine by service: among sequences of equal rank, the key with the least
service goes first. Within a key, requests are first come, first served. Each further sequence of a
request (`n` > 1) lets some later requests pass.
"""

import enum
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from operator import attrgetter

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.scheduling.fair_share import FairShare
from headrace.engine_proc.sequence.sequence import Sequence

turn_of = attrgetter("turn")
PASSING = 16  # requests that go before each further sequence of one that came before them
AGE_TOKENS = 16  # of prefix that a step of waiting is worth, with `lpm`


class Policy(enum.StrEnum):
    """The scheduling policy: the order before fairness between keys."""

    FCFS = "fcfs"  # nothing
    PRIORITY = "priority"  # the request's priority, the lowest first
    LPM = "lpm"  # the longest prefix in the cache (SGLang), and long waiting

    def importance(self, sequence: Sequence) -> tuple[int, int]:
        """Return whose pages, and whose images, come first: the least. Prefixes do not count."""
        priority = sequence.request.priority if self is Policy.PRIORITY else 0
        return priority, sequence.turn


class WaitingQueue:
    """The waiting sequences: one FIFO line per key and priority.

    The next sequence is the head of a line. With `lpm` (longest prefix match) it is any sequence.
    """

    def __init__(self, policy: Policy, pool: PagePool, shares: FairShare) -> None:
        self._policy = policy
        self._pool = pool
        self._shares = shares
        self._lines: dict[tuple[int, int], list[Sequence]] = {}  # in the order of their turns
        self._num_sequences = 0
        self.num_tokens = 0  # of all of them, prompts and what preempted ones have generated

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._lines.values())

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        line = self._lines.setdefault(self._line_of(sequence), [])
        insort(line, sequence, key=turn_of)
        self._num_sequences += 1
        self.num_tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        name = self._line_of(sequence)
        line = self._lines[name]
        found = line.pop(bisect_left(line, sequence.turn, key=turn_of))
        assert found is sequence
        if not line:
            del self._lines[name]
        self._num_sequences -= 1
        self.num_tokens -= len(sequence.tokens)

    @property
    def has_ready(self) -> bool:
        """Whether any sequence can be admitted: it waits for no image and no adapter."""
        return any(True for _ in ready(self))

    @property
    def num_admissible(self) -> int:
        """The tokens of prompts that may join a step: no more than free pages hold."""
        if not self.has_ready:
            return 0
        return min(self.num_tokens, self._pool.num_free * self._pool.page_tokens)

    def first(self, step: int) -> Sequence | None:
        """Return the next sequence to admit, or None.

        Args:
            step: the number of steps so far.
        """
        num = None if self._policy is Policy.LPM else 1  # of each line
        candidates = (s for line in self._lines.values() for s in islice(ready(line), num))
        return min(candidates, key=lambda sequence: self._rank(sequence, step), default=None)

    def _line_of(self, sequence: Sequence) -> tuple[int, int]:
        return self.importance(sequence)[0], sequence.request.key

    def _rank(self, sequence: Sequence, step: int) -> tuple[int, int, int]:
        priority, turn = self.importance(sequence)
        if self._policy is Policy.LPM:
            known = self._pool.count_cached(sequence.digests) * self._pool.page_tokens
            waited = step - sequence.queued_at
            priority = -(known + AGE_TOKENS * waited)
        return priority, self._shares.served(sequence.request.key), turn

    def importance(self, sequence: Sequence) -> tuple[int, int]:
        """Return the order in which running sequences keep their pages, the first for longest."""
        return self._policy.importance(sequence)


def make_turn(num_requests: int, index: int, num_sequences: int) -> int:
    """Return the turn of a sequence, which is unique: the lowest goes first.

    A later request waits for the first of many prompts, not for all. No sequence waits for ever: at
    most `PASSING * index` later requests go before it.

    Args:
        num_requests: that have come before its own.
        index: of the sequence within its request.
        num_sequences: that have come before it.
    """
    return (num_requests + PASSING * index) << 32 | num_sequences


def ready(sequences: Iterable[Sequence]) -> Iterator[Sequence]:
    """Yield those that wait for nothing but a turn."""
    return (sequence for sequence in sequences if sequence.may_begin)
