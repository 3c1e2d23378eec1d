"""The matrices that latent attention has for each head, taken apart and put together.

`kv_b_proj` holds a head's matrix of keys, [nope_dim, rank], then that of its values, [value_dim,
rank]. A query is multiplied by the former the other way, so keys become [rank, nope_dim]. Newer
GGUF files have both apart, and keys transposed already. Nothing is read before a weight is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.expert_stacks import NUMBER_TYPES
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight
from headrace.errors import ModelError

KEYS, VALUES = "[keys]", "[values]"  # behind the name of a tensor that has both
KEYS_AND_VALUES = ("kv_b_proj.weight", "attn_kv_b.weight")
OF_HEAD = re.compile(r"(.*attn_[kv]_b\.weight)\[\d+\]")  # of GGUF: a stack, already taken apart


@dataclass(frozen=True)
class TransposedWeight:
    """A `Weight`: some columns of a matrix as rows.

    Blocks of a quantized matrix lie along its rows, so it is decoded, and rounded to bf16.
    """

    matrix: Weight
    own: range  # columns of the matrix
    block_numbers: int = 1

    @property
    def format(self) -> Format:
        return self.matrix.format if self.matrix.format in NUMBER_TYPES else Format.BF16

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.own), self.matrix.shape[0]

    def rows(self, start: int, stop: int) -> "TransposedWeight":
        return replace(self, own=self.own[start:stop])

    def columns(self, start: int, stop: int) -> "TransposedWeight":
        return replace(self, matrix=self.matrix.rows(start, stop))

    def stored(self) -> StoredTensor:
        tensor = self.matrix.stored()
        numbers: npt.NDArray[Any]
        if tensor.format in NUMBER_TYPES:
            numbers = np.ascontiguousarray(tensor.data).view(NUMBER_TYPES[tensor.format])
        else:
            numbers = bf16_bits(tensor.to_float32())
        numbers = numbers.reshape(tensor.shape)[:, self.own.start : self.own.stop].T
        data = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)
        return StoredTensor(self.format, self.shape, data)

    def to_float32(self) -> npt.NDArray[np.float32]:
        return self.stored().to_float32()


def bf16_bits(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to the nearest bf16, to the even one of two."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class HeadMatrices:
    """A `Weight`: the matrices of heads, one after the other, all of one format and width."""

    heads: tuple[Weight, ...]

    @property
    def format(self) -> Format:
        return self.heads[0].format

    @property
    def block_numbers(self) -> int:
        return self.heads[0].block_numbers

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(head.shape[0] for head in self.heads), self.heads[0].shape[1]

    def rows(self, start: int, stop: int) -> "HeadMatrices":
        parts: list[Weight] = []
        first = 0
        for head in self.heads:
            begin, end = max(start - first, 0), min(stop - first, head.shape[0])
            if begin < end:
                parts.append(head.rows(begin, end))
            first += head.shape[0]
        return HeadMatrices(tuple(parts))

    def columns(self, start: int, stop: int) -> "HeadMatrices":
        return HeadMatrices(tuple(head.columns(start, stop) for head in self.heads))

    def stored(self) -> StoredTensor:
        data = [np.ascontiguousarray(head.stored().data).reshape(-1) for head in self.heads]
        return StoredTensor(self.format, self.shape, np.concatenate(data))

    def to_float32(self) -> npt.NDArray[np.float32]:
        return np.concatenate([head.to_float32() for head in self.heads])


def with_heads(
    tensors: Mapping[str, Weight], num_heads: int, nope_dim: int, value_dim: int
) -> dict[str, Weight]:
    """Return the tensors with matrices of keys, transposed, and those of values.

    Raises:
        ModelError: a tensor has another shape than these sizes say.
    """
    found: dict[str, Weight] = {}
    stacks: dict[str, list[Weight]] = {}
    for name, tensor in tensors.items():
        if name.endswith(KEYS_AND_VALUES):
            keys, values = keys_and_values(name, tensor, num_heads, nope_dim, value_dim)
            found |= {name + KEYS: keys, name + VALUES: values}
        elif match := OF_HEAD.fullmatch(name):
            stacks.setdefault(match[1], []).append(tensor)
        else:
            found[name] = tensor
    return found | {name: HeadMatrices(tuple(heads)) for name, heads in stacks.items()}


def keys_and_values(
    name: str, tensor: Weight, num_heads: int, nope_dim: int, value_dim: int
) -> tuple[HeadMatrices, HeadMatrices]:
    """Return the matrices of keys and of values that are one tensor."""
    size = nope_dim + value_dim
    if len(tensor.shape) != 2 or tensor.shape[0] != num_heads * size:
        raise ModelError(
            f"tensor {name!r} has shape {list(tensor.shape)}, "
            f"but {num_heads} heads of {nope_dim} and {value_dim} have {num_heads * size} rows"
        )
    firsts = range(0, num_heads * size, size)
    columns = range(tensor.shape[1])
    keys = (tensor.rows(first, first + nope_dim) for first in firsts)
    values = (tensor.rows(first + nope_dim, first + size) for first in firsts)
    return (
        HeadMatrices(tuple(TransposedWeight(matrix, columns) for matrix in keys)),
        HeadMatrices(tuple(values)),
    )
