"""A matrix of a checkpoint that is quantized to 8-bit floats, or a part of it."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor


@dataclass(frozen=True)
class Fp8Weight:
    """A `Weight`: a number is `code * scale`, in fp32."""

    codes: StoredTensor  # F8_E4M3 [rows, columns]
    scales: npt.NDArray[np.float32]  # [row blocks, column blocks], of the whole matrix
    block: tuple[int, int]  # rows and columns under a scale; columns of all, if it is for the row
    first_row: int = 0  # within the matrix
    first_block: int = 0  # of columns
    format: Format = Format.F32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def block_numbers(self) -> int:
        return self.block[1] if self.scales.shape[1] > 1 else 1

    def rows(self, start: int, stop: int) -> "Fp8Weight":
        codes = self.codes.rows(start, stop)
        return replace(self, codes=codes, first_row=self.first_row + start)

    def columns(self, start: int, stop: int) -> "Fp8Weight":
        codes = self.codes.columns(start, stop)
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes)
        assert start % self.block[1] == 0
        return replace(self, codes=codes, first_block=self.first_block + start // self.block[1])

    def row_scales(self) -> npt.NDArray[np.float32]:
        """Return the scales of each row, [rows, column blocks]."""
        rows = (self.first_row + np.arange(self.shape[0])) // self.block[0]
        num_blocks = -(-self.shape[1] // self.block[1])
        return self.scales[rows, self.first_block : self.first_block + num_blocks]

    def to_float32(self) -> npt.NDArray[np.float32]:
        blocks = np.arange(self.shape[1]) // self.block[1]
        return self.codes.to_float32() * self.row_scales()[:, blocks]

    def stored(self) -> StoredTensor:
        return StoredTensor(self.format, self.shape, self.to_float32().reshape(-1).view(np.uint8))
