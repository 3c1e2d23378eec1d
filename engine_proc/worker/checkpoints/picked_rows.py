"""A weight that is made of rows of another one."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight


@dataclass(frozen=True)
class PickedRows:
    """A `Weight` of some rows of another, in their order. Nothing is copied before it is read."""

    whole: Weight
    picks: npt.NDArray[np.int64]  # rows of `whole`

    @property
    def format(self) -> Format:
        return self.whole.format

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.picks), *self.whole.shape[1:])

    @property
    def block_numbers(self) -> int:
        return self.whole.block_numbers

    def rows(self, start: int, stop: int) -> "PickedRows":
        return replace(self, picks=self.picks[start:stop])

    def columns(self, start: int, stop: int) -> "PickedRows":
        return replace(self, whole=self.whole.columns(start, stop))

    def stored(self) -> StoredTensor:
        first, last = int(self.picks[0]), int(self.picks[-1])
        near = self.whole.rows(first, last + 1).stored()
        return StoredTensor(near.format, self.shape, near.lines[self.picks - first])

    def to_float32(self) -> npt.NDArray[np.float32]:
        return self.stored().to_float32()


def rows_of_each(weight: Weight, first: int, rows: int, every: int, count: int) -> PickedRows:
    """Return `count` rows of a weight: `rows` of each `every`, from the row `first` on."""
    numbers = np.arange(count)
    return PickedRows(weight, numbers // rows * every + numbers % rows + first)
