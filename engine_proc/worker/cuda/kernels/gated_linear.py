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
    find_tile,
    part_terms,
    tile_of,
)
from headrace.engine_proc.worker.cuda.kernels.linear import reference as linear_in_torch
from headrace.engine_proc.worker.cuda.kernels.numerics import dot, rounded
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
    tile = tile_of(num_rows, 1, x.dtype)
    num_columns = tile.columns // 2  # of the gate, and as many of the other
    gated_linear_kernel[(triton.cdiv(num, num_columns) * triton.cdiv(num_rows, tile.rows),)](
        out,
        x,
        weight,
        weight if bias is None else bias,
        num_rows,
        x.stride(0),
        NUM=num,
        NUM_TERMS=num_terms,
        HAS_BIAS=bias is not None,
        KIND=KINDS.index(activation),
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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    rows, columns = find_tile(num_rows, NUM, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
    is_row, is_column = rows < num_rows, columns < NUM
    of_gate = weight + columns.to(tl.int64)[None, :] * NUM_TERMS
    gate = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, NUM_TERMS, BLOCK):
        terms = first + tl.arange(0, BLOCK)
        is_term = terms < NUM_TERMS
        a = tl.load(
            x + rows[:, None] * x_stride + terms[None, :],
            mask=is_row[:, None] & is_term[None, :],
            other=0.0,
        )
        is_weight = is_column[None, :] & is_term[:, None]
        b = tl.load(of_gate + terms[:, None], mask=is_weight, other=0.0)
        gate = dot(a, b, gate)
        b = tl.load(of_gate + NUM * NUM_TERMS + terms[:, None], mask=is_weight, other=0.0)
        up = dot(a, b, up)
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
