"""Mamba-2's recurrence over a step's tokens, behind the states of their sequences.

A program has some columns of a head's matrix in registers, and goes through a sequence's tokens one
after the other: chunks change no bits. The state is fp32, [heads, state_size, head_dim].
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, next_power_of_2, softplus
from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves, clear_rows
from headrace.engine_proc.worker.cuda.mixers.state_moves import reference as moved
from headrace.engine_proc.worker.models.specs.decoder_spec import Mamba2Spec

BLOCK_COLUMNS = 8  # of a matrix, that a warp has


@dataclass(frozen=True)
class SsmHeads:
    """What heads have learned, [heads], fp32."""

    dt_bias: Tensor
    decay: Tensor
    skip: Tensor


def scan_ssm(
    mamba2: Mamba2Spec, xbc: Tensor, dt: Tensor, heads: SsmHeads, states: Tensor, moves: StateMoves
) -> Tensor:
    """Return the output of heads, [tokens, heads, head_dim], fp32. That of padding is zeros.

    Args:
        xbc: [tokens, inner_size + 2 * group_numbers], x, B and C, convolved.
        dt: [tokens, heads], before the multiplier and the bias; rows may lie apart.
        states: [slots, numbers], fp32, slots may lie apart.
    """
    num_heads, head_dim = len(mamba2.heads), mamba2.head_dim
    assert xbc.is_contiguous()
    assert dt.stride(1) == states.stride(1) == 1
    out = torch.empty(len(xbc), num_heads, head_dim, dtype=torch.float32, device=xbc.device)
    if len(xbc):
        scan_kernel[(moves.num_sequences + 1, num_heads, cdiv(head_dim, BLOCK_COLUMNS))](
            out,
            xbc,
            dt,
            heads.dt_bias,
            heads.decay,
            heads.skip,
            states,
            moves.query_starts,
            moves.slots,
            dt.stride(0),
            states.stride(0),
            mamba2.multipliers[4],
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            STATE_SIZE=mamba2.state_size,
            NUM_GROUPS=len(mamba2.groups),
            HEADS_PER_GROUP=mamba2.heads_per_group,
            FIRST_HEAD=mamba2.heads.start % mamba2.heads_per_group,
            BLOCK_ROWS=next_power_of_2(mamba2.state_size),
            BLOCK=BLOCK_COLUMNS,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def scan_kernel(
    out: tl.tensor,
    xbc: tl.tensor,
    dt: tl.tensor,
    dt_bias: tl.tensor,
    decays: tl.tensor,
    skips: tl.tensor,
    states: tl.tensor,
    query_starts: tl.tensor,
    slots: tl.tensor,
    dt_stride: tl.tensor,
    state_stride: tl.tensor,
    multiplier: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    INNER: tl.constexpr = NUM_HEADS * HEAD_DIM
    WIDTH: tl.constexpr = INNER + 2 * NUM_GROUPS * STATE_SIZE
    row, column = tl.arange(0, BLOCK_ROWS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_column = row < STATE_SIZE, column < HEAD_DIM
    reads = out + head * HEAD_DIM + column
    if sequence == tl.num_programs(0) - 1:
        clear_rows(reads, INNER, start, end, is_column)
        return
    if start >= end:
        return
    source = tl.load(slots + sequence * 3).to(tl.int64)
    target = tl.load(slots + sequence * 3 + 1).to(tl.int64)
    last = tl.load(slots + sequence * 3 + 2) - 1
    is_number = is_row[:, None] & is_column[None, :]
    place = states + (head * STATE_SIZE * HEAD_DIM + row[:, None] * HEAD_DIM + column[None, :])
    state = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    if source >= 0:
        state = tl.load(place + source * state_stride, mask=is_number, other=0.0)
    group = (FIRST_HEAD + head) // HEADS_PER_GROUP
    bias, decay, skip = tl.load(dt_bias + head), tl.load(decays + head), tl.load(skips + head)
    first = start.to(tl.int64)
    inputs = xbc + first * WIDTH + head * HEAD_DIM + column
    of_group = xbc + first * WIDTH + INNER + group * STATE_SIZE + row
    reads += first * INNER
    dt += first * dt_stride + head
    for token in tl.range(start, end, num_stages=4):
        b = tl.load(of_group, mask=is_row, other=0.0).to(tl.float32)
        c = tl.load(of_group + NUM_GROUPS * STATE_SIZE, mask=is_row, other=0.0).to(tl.float32)
        x = tl.load(inputs, mask=is_column, other=0.0).to(tl.float32)
        step = softplus(multiplier * tl.load(dt).to(tl.float32) + bias)
        state = state * tl.exp(step * decay) + b[:, None] * (step * x)[None, :]
        if (token == last) & (target >= 0):
            tl.store(place + target * state_stride, state, mask=is_number)
        tl.store(reads, tl.sum(state * c[:, None], 0) + skip * x, mask=is_column)
        inputs, of_group = inputs + WIDTH, of_group + WIDTH
        reads, dt = reads + INNER, dt + dt_stride


def reference(
    mamba2: Mamba2Spec, xbc: Tensor, dt: Tensor, heads: SsmHeads, states: Tensor, moves: StateMoves
) -> Tensor:
    """Do as `scan_ssm`, in plain torch."""
    num_heads = len(mamba2.heads)
    sizes = (mamba2.inner_size, mamba2.group_numbers, mamba2.group_numbers)
    x, b, c = xbc.float().split_with_sizes(sizes, 1)
    x = x.view(len(xbc), num_heads, mamba2.head_dim)
    groups = [head // mamba2.heads_per_group - mamba2.groups.start for head in mamba2.heads]
    b, c = (part.view(len(xbc), -1, mamba2.state_size)[:, groups] for part in (b, c))
    steps = F.softplus(mamba2.multipliers[4] * dt.float() + heads.dt_bias)
    decays = torch.exp(steps * heads.decay)
    out = torch.zeros_like(x)

    def run(rows: slice, before: Tensor) -> Tensor:
        matrix = before.view(num_heads, mamba2.state_size, mamba2.head_dim)
        for i in range(rows.start, rows.stop):
            moved_by = torch.einsum("h,hn,hp->hnp", steps[i], b[i], x[i])
            matrix = matrix * decays[i][:, None, None] + moved_by
            out[i] = torch.einsum("hn,hnp->hp", c[i], matrix) + heads.skip[:, None] * x[i]
        return matrix.flatten()

    moved(states, moves, run)
    return out
