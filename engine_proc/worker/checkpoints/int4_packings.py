"""The packings of 4-bit matrices in checkpoints: words of 32 bits, each with eight codes.

In every packing a number is `(code - zero) * scale`. Adjacent columns of a row, a group, share a
zero and a scale. A packing takes ranges of rows and columns of the matrix, [out, in].
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.weights import StoredTensor

Codes = npt.NDArray[np.uint8]
WORD_CODES = 8
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word of AWQ, of each of eight adjacent rows
SYMMETRIC = 8  # the zero of codes that are signed


class Packing(Protocol):
    """A packed matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, as unpacked."""
        ...

    def codes(self, rows: range, columns: range) -> Codes:
        """Return codes, [rows, columns]."""
        ...

    def zeros(self, rows: range) -> Codes:
        """Return zeros, [rows, groups]."""
        ...

    @property
    def scales(self) -> StoredTensor: ...

    def scales_of(self, rows: range) -> npt.NDArray[np.float32]:
        """Return scales, [rows, groups]."""
        ...


@dataclass(frozen=True)
class Awq:
    """AutoAWQ's "gemm": adjacent rows share a word, in an order of their own."""

    qweight: StoredTensor  # I32 [columns, rows / 8]
    qzeros: StoredTensor  # I32 [groups, rows / 8]
    scales: StoredTensor  # [groups, rows]

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[1] * WORD_CODES, self.qweight.shape[0]

    def codes(self, rows: range, columns: range) -> Codes:
        return self.unpack(words(self.qweight)[columns.start : columns.stop], rows)

    def zeros(self, rows: range) -> Codes:
        return self.unpack(words(self.qzeros), rows)

    def scales_of(self, rows: range) -> npt.NDArray[np.float32]:
        return transposed_scales(self.scales, rows)

    def unpack(self, packed: npt.NDArray[np.uint32], rows: range) -> Codes:
        """Return some rows, given words that hold all of them."""
        first, last = rows.start // WORD_CODES, -(-rows.stop // WORD_CODES)
        eights = nibbles(packed[:, first:last]).reshape(len(packed), -1, WORD_CODES)
        unpacked = eights[:, :, AWQ_PLACES].reshape(len(packed), -1)
        skipped = rows.start - first * WORD_CODES
        return unpacked[:, skipped : skipped + len(rows)].T


@dataclass(frozen=True)
class Gptq:
    """GPTQ: adjacent columns share a word, of zeros adjacent rows."""

    qweight: StoredTensor  # I32 [columns / 8, rows]
    qzeros: StoredTensor  # I32 [groups, rows / 8]
    scales: StoredTensor  # [groups, rows]
    added_to_zeros: int  # 1, but in "gptq_v2"

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[1], self.qweight.shape[0] * WORD_CODES

    def codes(self, rows: range, columns: range) -> Codes:
        return columns_of(words(self.qweight)[:, rows.start : rows.stop].T, columns)

    def zeros(self, rows: range) -> Codes:
        stored = columns_of(words(self.qzeros), rows).T
        return stored + np.uint8(self.added_to_zeros)

    def scales_of(self, rows: range) -> npt.NDArray[np.float32]:
        return transposed_scales(self.scales, rows)


@dataclass(frozen=True)
class PackQuantized:
    """The "pack-quantized" of compressed-tensors: as GPTQ, rows first; codes are made unsigned."""

    weight_packed: StoredTensor  # I32 [rows, columns / 8]
    scales: StoredTensor  # [rows, groups]
    weight_zero_point: StoredTensor | None  # I32 [rows / 8, groups]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight_packed.shape[0], self.weight_packed.shape[1] * WORD_CODES

    def codes(self, rows: range, columns: range) -> Codes:
        return columns_of(words(self.weight_packed)[rows.start : rows.stop], columns)

    def zeros(self, rows: range) -> Codes:
        if self.weight_zero_point is None:
            return np.full((len(rows), self.scales.shape[1]), SYMMETRIC, np.uint8)
        return columns_of(words(self.weight_zero_point).T, rows).T

    def scales_of(self, rows: range) -> npt.NDArray[np.float32]:
        return self.scales.rows(rows.start, rows.stop).to_float32()


def words(tensor: StoredTensor) -> npt.NDArray[np.uint32]:
    """Return the words of a tensor, [rows, columns]."""
    return tensor.data.view("<u4").reshape(tensor.shape)


def nibbles(packed: npt.NDArray[np.uint32]) -> Codes:
    """Unpack [rows, words] to [rows, 8 * words], the lowest bits of a word first."""
    octets = np.ascontiguousarray(packed).view(np.uint8)
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(packed), -1)


def columns_of(packed: npt.NDArray[np.uint32], columns: range) -> Codes:
    """Return some columns, given words that hold all of them."""
    first, last = columns.start // WORD_CODES, -(-columns.stop // WORD_CODES)
    skipped = columns.start - first * WORD_CODES
    return nibbles(packed[:, first:last])[:, skipped : skipped + len(columns)]


def transposed_scales(scales: StoredTensor, rows: range) -> npt.NDArray[np.float32]:
    """Return [rows, groups] of a tensor stored as [groups, rows]."""
    return np.ascontiguousarray(scales.columns(rows.start, rows.stop).to_float32().T)
