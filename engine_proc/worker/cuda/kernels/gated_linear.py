"""Both products of a gated MLP and the activation, in one launch. The bits equal those of `linear`
followed by `act_mul`."""

import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.gated_activation import KINDS, activate
from headrace.engine_proc.worker.cuda.kernels.gated_activation import reference as gate_in_torch
from headrace.engine_proc.worker.cuda.kernels.linear import (
    BLOCK,
    GROUP_ROWS,
    can_use_tma,
    descriptor,
    find_tile,
    load_block,
    part_terms,
    tile_of,
)
from headrace.engine_proc.worker.cuda.kernels.linear import reference as linear_in_torch
from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, dot, rounded
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation


def can_be_gated(weight: Tensor) -> bool:
    """Whether sums of a product with it are of one part: others have a launch of their own."""
    return part_terms(*weight.shape) >= weight.shape[1]


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """Return `act(gate) * up` where `x @ weight.T + bias` is both, gates first.

    Args:
        x: [rows, terms]
        weight: [2 * numbers, terms]
        bias: [2 * numbers]
    Returns:
        [rows, numbers]
    """
    num_rows, num_terms = x.shape
    num = len(weight) // 2
    assert can_be_gated(weight)
    assert weight.shape[1] == num_terms
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = x.new_empty(num_rows, num)
    if num_rows == 0:
        return out
    tile = tile_of(num_rows, len(weight), num_terms, x.dtype)
    num_columns = tile.columns // 2  # of the gate, and as many of the other
    has_tma = tile.has_tma and can_use_tma(x, weight)
    gated_linear_kernel[(cdiv(num, num_columns) * cdiv(num_rows, tile.rows),)](
        out,
        descriptor(x, tile.rows) if has_tma else x,
        descriptor(weight, num_columns) if has_tma else weight,
        weight if bias is None else bias,
        num_rows,
        x.stride(0),
        NUM=num,
        NUM_TERMS=num_terms,
        HAS_BIAS=bias is not None,
        KIND=KINDS.index(activation),
        HAS_TMA=has_tma,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=num_columns,
        BLOCK=BLOCK,
        GROUP=GROUP_ROWS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def gated_linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    NUM: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_TMA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    row, column = find_tile(num_rows, NUM, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
    rows = (row + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    is_row, is_column = rows < num_rows, columns < NUM
    gate = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, NUM_TERMS, BLOCK):
        if HAS_TMA:
            a = x.load([row, first])
            of_gate, of_up = weight.load([column, first]), weight.load([NUM + column, first])
        else:
            a = load_block(x, row, first, num_rows, x_stride, NUM_TERMS, BLOCK_ROWS, BLOCK)
            of_gate = load_block(
                weight, column, first, NUM, NUM_TERMS, NUM_TERMS, BLOCK_COLUMNS, BLOCK
            )
            of_up = load_block(
                weight, NUM + column, first, 2 * NUM, NUM_TERMS, NUM_TERMS, BLOCK_COLUMNS, BLOCK
            )
        gate, up = dot(a, of_gate.T, gate), dot(a, of_up.T, up)
    if HAS_BIAS:
        gate += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + NUM + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    gate = rounded(gate, out.dtype.element_ty).to(tl.float32)
    up = rounded(up, out.dtype.element_ty).to(tl.float32)
    tl.store(
        out + rows[:, None] * NUM + columns[None, :],
        rounded(activate(gate, KIND) * up, out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """Do as `gated_linear`, in plain torch."""
    return gate_in_torch(linear_in_torch(x, weight, bias), activation)
