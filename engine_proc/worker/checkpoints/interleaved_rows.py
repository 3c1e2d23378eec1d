"""Matrices whose rows are interleaved with others', and rates that are stored as logarithms.

Nothing is copied before a weight is read.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight


@dataclass(frozen=True)
class InterleavedRows:
    """A `Weight` of each `period` rows of a tensor, of which `run` are its own, from `first` on."""

    tensor: Weight
    first: int
    run: int
    period: int
    begin: int  # its first row and its end, counted in its own
    end: int

    @property
    def format(self) -> Format:
        return self.tensor.format

    @property
    def shape(self) -> tuple[int, ...]:
        return self.end - self.begin, *self.tensor.shape[1:]

    @property
    def block_numbers(self) -> int:
        return self.tensor.block_numbers

    def rows(self, start: int, stop: int) -> "InterleavedRows":
        return replace(self, begin=self.begin + start, end=self.begin + stop)

    def columns(self, start: int, stop: int) -> "InterleavedRows":
        return replace(self, tensor=self.tensor.columns(start, stop))

    def stored(self) -> StoredTensor:
        runs = []
        row = self.begin
        while row < self.end:
            index, offset = divmod(row, self.run)
            count = min(self.run - offset, self.end - row)
            at = index * self.period + self.first + offset
            runs.append(self.tensor.rows(at, at + count).stored().lines)
            row += count
        return StoredTensor(self.format, self.shape, np.concatenate(runs).reshape(-1))

    def to_float32(self) -> npt.NDArray[np.float32]:
        return self.stored().to_float32()


@dataclass(frozen=True)
class NegatedExponentials:
    """A `Weight` of the rates whose logarithms, without their sign, a tensor holds."""

    logarithms: Weight
    format: Format = Format.F32
    block_numbers: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.logarithms.shape

    def rows(self, start: int, stop: int) -> "NegatedExponentials":
        return replace(self, logarithms=self.logarithms.rows(start, stop))

    def columns(self, start: int, stop: int) -> "NegatedExponentials":
        return replace(self, logarithms=self.logarithms.columns(start, stop))

    def stored(self) -> StoredTensor:
        return StoredTensor(self.format, self.shape, self.to_float32().reshape(-1).view(np.uint8))

    def to_float32(self) -> npt.NDArray[np.float32]:
        rates: npt.NDArray[np.float32] = -np.exp(self.logarithms.to_float32())
        return rates
