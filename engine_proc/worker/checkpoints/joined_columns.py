"""Columns of a matrix that are not adjacent, as one weight."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight


@dataclass(frozen=True)
class JoinedColumns:
    """A `Weight` of pieces side by side, each of whole blocks. Nothing is copied before a read."""

    pieces: tuple[Weight, ...]

    @property
    def format(self) -> Format:
        return self.pieces[0].format

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pieces[0].shape[0], sum(piece.shape[1] for piece in self.pieces)

    @property
    def block_numbers(self) -> int:
        return self.pieces[0].block_numbers

    def rows(self, start: int, stop: int) -> "JoinedColumns":
        return JoinedColumns(tuple(piece.rows(start, stop) for piece in self.pieces))

    def columns(self, start: int, stop: int) -> "JoinedColumns":
        pieces, first = [], 0
        for piece in self.pieces:
            begin, end = max(start - first, 0), min(stop - first, piece.shape[1])
            if begin < end:
                pieces.append(piece.columns(begin, end))
            first += piece.shape[1]
        return JoinedColumns(tuple(pieces))

    def stored(self) -> StoredTensor:
        lines = [piece.stored().lines for piece in self.pieces]
        return StoredTensor(self.format, self.shape, np.concatenate(lines, axis=1).reshape(-1))

    def to_float32(self) -> npt.NDArray[np.float32]:
        return self.stored().to_float32()
