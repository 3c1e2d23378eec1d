"""Which slot of the workers has a sequence's history, and how much of it they know. Pure.

A history is what penalties look at. It stays in the workers, in a slot of its sequence, so a step
brings only what is new. Drafts are never known: the next step puts its tokens in their places.
"""

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heappop, heappush

from headrace.engine_proc.sequence.sequence import Sequence


@dataclass(slots=True)
class HistorySlot:
    """One sequence's, and how many tokens of the history are in it."""

    number: int
    num_known: int = 0


class HistorySlots:
    """The slots of all sequences with penalties, as few and as low as can be.

    A sequence that has ended gives its slot back. One that is preempted keeps it, unless others
    need it: then the one that was told nothing for longest loses its own.

    Args:
        num_slots: no step has more sequences.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._by_sequence: OrderedDict[Sequence, HistorySlot] = OrderedDict()  # the first one goes
        self._free: list[int] = []  # a heap, of those that were in use

    def find(self, sequence: Sequence) -> HistorySlot:
        """Return a sequence's slot, a new one where it has none."""
        slot = self._by_sequence.get(sequence)
        if slot is None:
            slot = self._by_sequence[sequence] = HistorySlot(self._take())
        else:
            self._by_sequence.move_to_end(sequence)
        return slot

    def _take(self) -> int:
        if self._free:
            return heappop(self._free)
        if len(self._by_sequence) < self._num_slots:
            return len(self._by_sequence)
        _, slot = self._by_sequence.popitem(last=False)
        return slot.number

    def drop_ended(self) -> None:
        """Take back the slots of sequences that have ended."""
        for sequence in [each for each in self._by_sequence if each.has_ended]:
            heappush(self._free, self._by_sequence.pop(sequence).number)

    def forget(self) -> None:
        """Note that workers know nothing: they are new ones, or steps in flight have failed."""
        for slot in self._by_sequence.values():
            slot.num_known = 0
