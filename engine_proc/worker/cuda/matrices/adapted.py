"""A matrix with the factors of adapters (LoRA), which rows are multiplied with by their slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.low_rank import expand, shrink
from headrace.engine_proc.worker.cuda.matrices.matrices import Matrix, fused
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes


@dataclass(frozen=True)
class AdapterRoom:
    """How many adapters there is room for, and how large each of them is at most."""

    num_slots: int
    max_rank: int


@dataclass
class RowSlots:
    """The slots of the adapters of a step's rows, -1 of none. Set anew for each step."""

    tokens: Tensor  # [tokens], int32
    logit_rows: Tensor  # [rows], int32


@dataclass(frozen=True)
class PartFactors:
    """What adapters have for one of the weights that a matrix consists of."""

    a: Tensor  # [slots, ranks, terms], of the matrix's
    b: Tensor  # [slots, columns, ranks]
    gains: Tensor  # [slots, columns], fp32, less 1

    def clear(self, slot: int) -> None:
        """Have nothing in a slot."""
        for factors in (self.a, self.b, self.gains):
            factors[slot].zero_()

    def put(self, slot: int, a: Tensor, b: Tensor, gains: Tensor | None) -> None:
        """Have factors of some rank in an empty slot."""
        self.a[slot, : len(a)] = a
        self.b[slot, :, : b.shape[1]] = b
        if gains is not None:
            self.gains[slot] = gains


class AdaptedMatrix:
    """A `Matrix`. Its parts are weights, columns after columns; each has factors of its own."""

    def __init__(
        self,
        matrix: Matrix,
        columns: Sequence[int],
        num_terms: int,
        room: AdapterRoom,
        like: Tensor,
        rows: RowSlots,
        is_head: bool,
    ) -> None:
        """Have room for factors of the type and on the device of `like`."""
        self._matrix, self._rows, self._is_head = matrix, rows, is_head
        slots, rank = room.num_slots, room.max_rank
        self._a = like.new_zeros(slots, len(columns) * rank, num_terms)
        self.parts = [
            PartFactors(
                self._a[:, i * rank : (i + 1) * rank],
                like.new_zeros(slots, count, rank),
                like.new_zeros(slots, count, dtype=torch.float32),
            )
            for i, count in enumerate(columns)
        ]

    @property
    def bias(self) -> Tensor | None:
        """Of the matrix."""
        return self._matrix.bias

    def apply(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias` with what the adapters of rows add, [rows, columns]."""
        out = self._matrix.apply(x)
        slots = self._rows.logit_rows if self._is_head else self._rows.tokens
        shrunk = shrink(x, self._a, slots)
        column = rank = 0
        for part in self.parts:
            count, own = part.b.shape[1:]
            bias = None if self.bias is None else self.bias[column : column + count]
            columns, ranks = slice(column, column + count), slice(rank, rank + own)
            expand(out[:, columns], shrunk[:, :, ranks], part.b, part.gains, bias, slots)
            column, rank = column + count, rank + own
        return out


def adapt(
    spec: DecoderSpec,
    matrices: Mapping[str, Matrix],
    room: AdapterRoom,
    like: Tensor,
    rows: RowSlots,
) -> tuple[dict[str, Matrix], dict[str, PartFactors]]:
    """Return the matrices with room for adapters, and where each weight has its factors."""
    shapes = weight_shapes(spec)
    shapes.setdefault("head", shapes["embed"])
    sources = fused(spec)
    adapted: dict[str, Matrix] = {}
    parts: dict[str, PartFactors] = {}
    for name, matrix in matrices.items():
        weights = sources.get(name, [name])
        columns, num_terms = [shapes[own][0] for own in weights], shapes[weights[0]][1]
        own = AdaptedMatrix(matrix, columns, num_terms, room, like, rows, name == "head")
        adapted[name] = own
        parts |= zip(weights, own.parts, strict=True)
    return adapted, parts
