"""Where a file has a weight: rows of a tensor, adjacent or taking turns with those of others."""

import itertools
from typing import NamedTuple

from headrace.engine_proc.worker.checkpoints.interleaved_rows import (
    InterleavedRows,
    NegatedExponentials,
)
from headrace.engine_proc.worker.checkpoints.weights import Weight


class WeightSource(NamedTuple):
    """The source of a weight: rows of a tensor of the file, from `first_row` on.

    With a `period`, `run` rows of each are the weight's.
    """

    tensor: str
    first_row: int = 0
    run: int = 0
    period: int = 0
    is_logarithm: bool = False  # of rates, without their sign

    def weight_of(self, tensor: Weight, num_rows: int) -> Weight:
        """Return the weight."""
        if self.period:
            return InterleavedRows(tensor, self.first_row, self.run, self.period, 0, num_rows)
        rows = tensor.rows(self.first_row, self.first_row + num_rows)
        return NegatedExponentials(rows) if self.is_logarithm else rows


def interleaved(tensor: str, **runs: int) -> dict[str, WeightSource]:
    """Name the rows of weights that take turns, so many of each."""
    ends = itertools.accumulate(runs.values())
    period = sum(runs.values())
    return {
        name: WeightSource(tensor, end - run, run, period)
        for (name, run), end in zip(runs.items(), ends, strict=True)
    }
