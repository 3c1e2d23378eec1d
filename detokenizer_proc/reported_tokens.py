"""Tokens reported with their log probabilities, in columns until they are rendered."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from headrace.ipc.token_logprobs import TokenLogprob


class ReportedToken(NamedTuple):
    """A token and how likely it was; a prompt's first token has nothing to follow."""

    id: int
    likely: TokenLogprob | None
    offset: int  # characters of the text before it


class ReportedTokens(Sequence[ReportedToken]):
    """A list of `ReportedToken` that takes 16 bytes of memory for each beside its row."""

    def __init__(self) -> None:
        self.ids = array("I")
        self.offsets = array("I")
        self._ends = array("Q", [0])  # of each row; the first is where the rows begin
        self._rows = bytearray()

    def append(self, id: int, row: bytes | memoryview, offset: int) -> None:
        """Add a token; `row` is of `token_logprobs.py`, or empty where nothing is known."""
        self.ids.append(id)
        self.offsets.append(offset)
        self._rows += row
        self._ends.append(len(self._rows))

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, place: int) -> ReportedToken: ...
    @overload
    def __getitem__(self, place: slice) -> "ReportedTokens": ...
    def __getitem__(self, place: "int | slice") -> "ReportedToken | ReportedTokens":
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            assert step == 1
            return self._between(start, max(start, stop))
        place = range(len(self))[place]
        row = self._rows[self._ends[place] : self._ends[place + 1]]
        return ReportedToken(
            self.ids[place], TokenLogprob.unpack(row) if row else None, self.offsets[place]
        )

    def __iter__(self) -> Iterator[ReportedToken]:
        return (self[place] for place in range(len(self)))

    def __iadd__(self, others: "ReportedTokens") -> "ReportedTokens":
        shift = len(self._rows) - others._ends[0]
        self.ids += others.ids
        self.offsets += others.offsets
        self._ends.extend(end + shift for end in others._ends[1:])
        self._rows += others._rows
        return self

    @property
    def num_bytes(self) -> int:
        """Size of the rows, bytes."""
        return len(self._rows)

    def num_before(self, offset: int) -> int:
        """Return how many begin before a place of the text."""
        return bisect_left(self.offsets, offset)

    def _between(self, start: int, stop: int) -> "ReportedTokens":
        found = ReportedTokens()
        first, last = self._ends[start], self._ends[stop]
        found.ids, found.offsets = self.ids[start:stop], self.offsets[start:stop]
        found._ends = array("Q", (end - first for end in self._ends[start : stop + 1]))
        found._rows = self._rows[first:last]
        return found


def rows_of(rows: bytes, count: int) -> list[memoryview]:
    """Return the rows of `count` tokens, or none where there are no bytes."""
    if not rows:
        return []
    size, rest = divmod(len(rows), count)
    assert not rest, "all rows of a sequence are of one size"
    view = memoryview(rows)
    return [view[start : start + size] for start in range(0, len(rows), size)]
