"""Positions in three parts, for models whose RoPE turns by time, height and width (M-RoPE).

Text goes on in all three alike. The rows of an image lie on a grid that begins where text would go
on; behind it, text goes on after its longer side.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import product

Grid = Sequence[int]  # frames, rows, columns


class MRopePositions:
    """Those of one sequence."""

    def __init__(self, images: Iterable[tuple[int, Grid]] = ()) -> None:
        """`images` has the index of each image's first row token and its grid, in order."""
        self._triples = array("i")  # up to the end of the last image
        self._shift = 0  # from index to position, behind it
        for first, (frames, rows, columns) in images:
            self._go_on(self._triples, range(len(self._triples) // 3, first))
            start = first + self._shift
            for cell in product(range(frames), range(rows), range(columns)):
                self._triples.extend(start + part for part in cell)
            self._shift += max(rows, columns) - frames * rows * columns

    def of(self, start: int, count: int) -> "array[int]":
        """Return those of `count` tokens from `start` on, three of each."""
        triples = self._triples[3 * start : 3 * (start + count)]
        self._go_on(triples, range(start + len(triples) // 3, start + count))
        return triples

    def _go_on(self, triples: "array[int]", indices: range) -> None:
        for index in indices:
            triples.extend((index + self._shift,) * 3)
