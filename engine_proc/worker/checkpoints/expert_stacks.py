"""Tensors that hold a matrix of every expert, taken apart.

The matrix of expert 3 in tensor `NAME` is called `NAME[3]`. Where rows of gate and up alternate,
these are `NAME[3][0::2]` and `NAME[3][1::2]`. Nothing is copied before a weight is read.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight
from headrace.errors import ModelError

NUMBER_TYPES = {Format.F32: "<u4", Format.F16: "<u2", Format.BF16: "<u2"}
STACKED_BIASES = ("_exps.bias", "experts.down_proj_bias", "experts.gate_up_proj_bias")
GATE_UP = "experts.gate_up_proj"
LLAMA4 = "feed_forward.experts."  # its stacks are transposed, as gpt-oss's are
BLOCKS, SCALES = "_blocks", "_scales"
MXFP4_NUMBERS = 32
# Of one row or column, which files and formats write in several ways.
VECTORS = ("e_score_correction_bias", "exp_probs_b.bias")
ROWS = ("ffn_gate_inp_shexp.weight",)
CONVOLUTIONS = (  # [channels, (1,) kernel]
    "conv.conv.weight",  # LFM2
    "shortconv.conv.weight",
    ".conv1d.weight",  # Mamba-2, gated delta nets
    ".ssm_conv1d.weight",
    *(f"{name}_conv1d.weight" for name in "qkv"),  # Kimi
    *(f".ssm_conv1d_{name}.weight" for name in "qkv"),
)
COLUMNS = (".ssm_a", ".ssm_d", ".ssm_norm.weight", ".A_log")  # vectors stored as matrices
SCALARS = ("act_fn.beta", "act_fn.eps")  # of Apertus


@dataclass(frozen=True)
class StridedWeight:
    """A `Weight` whose numbers do not lie row after row: transposed, or each second row."""

    format: Format
    numbers: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]  # as stored, [rows] or [rows, columns]
    block_numbers: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    def rows(self, start: int, stop: int) -> "StridedWeight":
        return replace(self, numbers=self.numbers[start:stop])

    def columns(self, start: int, stop: int) -> "StridedWeight":
        return replace(self, numbers=self.numbers[:, start:stop])

    def stored(self) -> StoredTensor:
        data = np.ascontiguousarray(self.numbers).reshape(-1).view(np.uint8)
        return StoredTensor(self.format, self.shape, data)

    def to_float32(self) -> npt.NDArray[np.float32]:
        return self.stored().to_float32()


@dataclass(frozen=True)
class Mxfp4Weight:
    """A `Weight` of gpt-oss: nibbles and exponents are in tensors of their own.

    A byte of `blocks` has two adjacent numbers, the first one low. One of a GGUF block has numbers
    16 apart. Both name the same table, and an exponent means the same.
    """

    blocks: npt.NDArray[np.uint8]  # [rows, groups, 16]
    scales: npt.NDArray[np.uint8]  # [rows, groups]
    format: Format = Format.MXFP4
    block_numbers: int = MXFP4_NUMBERS

    @property
    def shape(self) -> tuple[int, ...]:
        num_rows, num_groups = self.scales.shape
        return num_rows, num_groups * MXFP4_NUMBERS

    def rows(self, start: int, stop: int) -> "Mxfp4Weight":
        return replace(self, blocks=self.blocks[start:stop], scales=self.scales[start:stop])

    def columns(self, start: int, stop: int) -> "Mxfp4Weight":
        assert start % MXFP4_NUMBERS == 0
        groups = slice(start // MXFP4_NUMBERS, stop // MXFP4_NUMBERS)
        return replace(self, blocks=self.blocks[:, groups], scales=self.scales[:, groups])

    def stored(self) -> StoredTensor:
        blocks = np.empty((*self.scales.shape, 17), np.uint8)
        blocks[..., 0] = self.scales
        first, second = self.blocks[..., :8], self.blocks[..., 8:]  # of each, 16 numbers
        blocks[..., 1::2] = first & 15 | second << 4
        blocks[..., 2::2] = first >> 4 | second & 240
        return StoredTensor(self.format, self.shape, blocks.reshape(-1))

    def to_float32(self) -> npt.NDArray[np.float32]:
        return self.stored().to_float32()


def unstacked(tensors: Mapping[str, Weight], transposed: Collection[str] = ()) -> dict[str, Weight]:
    """Return the tensors with those of experts taken apart.

    Args:
        transposed: further stacks whose matrices are, beside Llama 4's and gpt-oss's.

    Raises:
        ModelError: a tensor of MXFP4 lacks its other part, or differs from it in shape.
    """
    apart: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, StoredTensor):
            apart[name] = tensor
        elif tensor.format == Format.U8:
            if name.endswith(BLOCKS):
                apart |= mxfp4_parts(name.removesuffix(BLOCKS), tensor, tensors)
        elif is_stack(name, tensor):
            alternates = is_gpt_oss(name, tensors)
            is_transposed = alternates or LLAMA4 in name or name in transposed
            apart |= parts(name, tensor, is_transposed, alternates)
        else:
            apart[name] = reshaped(name, tensor)
    return apart


def is_stack(name: str, tensor: StoredTensor) -> bool:
    """Whether a tensor has a part for each expert."""
    has_numbers = math.prod(tensor.shape) > 0
    rank = len(tensor.shape)
    if name.endswith(CONVOLUTIONS + COLUMNS):
        return False
    return has_numbers and (rank == 3 or (rank == 2 and name.endswith(STACKED_BIASES)))


def is_gpt_oss(name: str, tensors: Mapping[str, Weight]) -> bool:
    """Whether a stack is transposed, and alternates gate and up: only this family has biases."""
    module = name.rpartition(".")[0]
    return f"{module}.gate_up_proj_bias" in tensors


def parts(
    name: str, stack: StoredTensor, is_transposed: bool, alternates: bool
) -> Iterator[tuple[str, Weight]]:
    """Yield the part of each expert.

    Args:
        alternates: rows of gate and up do, in what is transposed.
    """
    for expert, line in enumerate(stack.lines):
        whole = StoredTensor(stack.format, stack.shape[1:], line)
        part = f"{name}[{expert}]"
        if not is_transposed or stack.format not in NUMBER_TYPES:
            yield part, whole
            continue
        numbers = line.view(NUMBER_TYPES[stack.format]).reshape(whole.shape).T
        if GATE_UP in name and alternates:
            yield f"{part}[0::2]", StridedWeight(stack.format, numbers[0::2])
            yield f"{part}[1::2]", StridedWeight(stack.format, numbers[1::2])
        else:
            yield part, StridedWeight(stack.format, numbers)


def mxfp4_parts(
    name: str, blocks: StoredTensor, tensors: Mapping[str, Weight]
) -> Iterator[tuple[str, Weight]]:
    """Yield the part of each expert, of two tensors."""
    scales = tensors.get(name + SCALES)
    if not isinstance(scales, StoredTensor):
        raise ModelError(f"tensor {name + SCALES!r} is missing; {name + BLOCKS!r} needs it")
    wanted = (*scales.shape, MXFP4_NUMBERS // 2)
    if blocks.shape != wanted or len(wanted) != 4 or scales.format != Format.U8:
        raise ModelError(
            f"tensor {name + BLOCKS!r} has shape {list(blocks.shape)}, not {list(wanted)}, "
            f"as that of its scales would have it"
        )
    codes, exponents = (part.data.reshape(part.shape) for part in (blocks, scales))
    for expert, (own, scale) in enumerate(zip(codes, exponents, strict=True)):
        part = f"{name}[{expert}]"
        if name.endswith(GATE_UP):
            yield f"{part}[0::2]", Mxfp4Weight(own[0::2], scale[0::2])
            yield f"{part}[1::2]", Mxfp4Weight(own[1::2], scale[1::2])
        else:
            yield part, Mxfp4Weight(own, scale)


def reshaped(name: str, tensor: StoredTensor) -> StoredTensor:
    """Return a vector as a vector, and a matrix of one row as a matrix; convolutions flat.

    A number without a shape becomes a vector.
    """
    if name.endswith(SCALARS):
        return replace(tensor, shape=(1,))
    if name.endswith(CONVOLUTIONS + COLUMNS):
        return replace(tensor, shape=(math.prod(tensor.shape),))
    if name.endswith(VECTORS) and len(tensor.shape) == 2 and tensor.shape[0] == 1:
        return replace(tensor, shape=tensor.shape[1:])
    if name.endswith(ROWS) and len(tensor.shape) == 1:
        return replace(tensor, shape=(1, *tensor.shape))
    return tensor
