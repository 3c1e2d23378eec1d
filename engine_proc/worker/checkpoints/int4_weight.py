"""A matrix of a checkpoint that is quantized to 4 bits, or a part of it."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.int4_packings import SYMMETRIC, Codes, Packing
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor

Q4_0_NUMBERS = 32


@dataclass(frozen=True)
class PackedMatrix:
    """A whole matrix."""

    packing: Packing
    group_size: int  # adjacent columns under a scale
    group_of: npt.NDArray[np.int32] | None = None  # each column's group, if they are not adjacent

    @cached_property
    def is_q4_0(self) -> bool:
        """Whether its numbers are those of ggml's Q4_0: a scale in fp16, codes without a zero."""
        return (
            self.group_of is None
            and self.group_size % Q4_0_NUMBERS == 0
            and self.packing.scales.format == Format.F16
            and bool((self.packing.zeros(range(self.packing.shape[0])) == SYMMETRIC).all())
        )


@dataclass(frozen=True)
class Int4Weight:
    """A `Weight` that decodes exactly."""

    matrix: PackedMatrix
    row_range: range  # of the matrix
    column_range: range

    @classmethod
    def of(cls, matrix: PackedMatrix) -> "Int4Weight":
        """Return the whole."""
        num_rows, num_columns = matrix.packing.shape
        return cls(matrix, range(num_rows), range(num_columns))

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.row_range), len(self.column_range)

    @property
    def block_numbers(self) -> int:
        return 1 if self.matrix.group_of is not None else self.matrix.group_size

    @property
    def format(self) -> Format:
        return Format.Q4_0 if self.matrix.is_q4_0 else Format.F32

    def rows(self, start: int, stop: int) -> "Int4Weight":
        return replace(self, row_range=self.row_range[start:stop])

    def columns(self, start: int, stop: int) -> "Int4Weight":
        assert start % self.block_numbers == 0
        return replace(self, column_range=self.column_range[start:stop])

    @property
    def groups(self) -> npt.NDArray[np.int32]:
        """The group of each column, in what the next two return."""
        if self.matrix.group_of is not None:
            return self.matrix.group_of[self.column_range.start : self.column_range.stop]
        return np.arange(len(self.column_range), dtype=np.int32) // self.matrix.group_size

    def scales(self) -> npt.NDArray[np.float32]:
        """Return scales, [rows, groups]."""
        return self.matrix.packing.scales_of(self.row_range)[:, self.own_groups]

    def zeros(self) -> Codes:
        """Return zeros, [rows, groups]."""
        return self.matrix.packing.zeros(self.row_range)[:, self.own_groups]

    def codes(self) -> Codes:
        """Return codes, [rows, columns]."""
        return self.matrix.packing.codes(self.row_range, self.column_range)

    @property
    def own_groups(self) -> slice:
        """Groups of its columns; all, if columns are in no order."""
        if self.matrix.group_of is not None:
            return slice(None)
        size = self.matrix.group_size
        return slice(self.column_range.start // size, -(-self.column_range.stop // size))

    def to_float32(self) -> npt.NDArray[np.float32]:
        groups = self.groups
        steps = self.codes().astype(np.float32) - self.zeros()[:, groups]
        return np.ascontiguousarray(steps * self.scales()[:, groups])

    def stored(self) -> StoredTensor:
        if self.format == Format.F32:
            return StoredTensor(Format.F32, self.shape, self.to_float32().reshape(-1).view("u1"))
        halves = self.codes().reshape(-1, 2, Q4_0_NUMBERS // 2)
        scales = self.scales()[:, self.groups[::Q4_0_NUMBERS]].astype("<f2").reshape(-1, 1)
        blocks = np.hstack([scales.view(np.uint8), halves[:, 0] | halves[:, 1] << 4])
        return StoredTensor(Format.Q4_0, self.shape, blocks.reshape(-1))
