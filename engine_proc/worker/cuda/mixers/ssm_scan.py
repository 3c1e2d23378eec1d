"""The recurrences of Mamba-2 and of Mamba over a step's tokens, behind the states of sequences.

A program has some columns of a head's matrix in registers, and goes through a sequence's tokens one
after the other: chunks change no bits. The state is fp32, [heads, state_size, head_dim]. Mamba's is
that of one head, whose columns are channels. Each has steps and decays of its own.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, next_power_of_2, softplus
from headrace.engine_proc.worker.cuda.mixers.state_moves import (
    StateMoves,
    clear_rows,
    load_move,
    load_state,
)
from headrace.engine_proc.worker.cuda.mixers.state_moves import reference as moved
from headrace.engine_proc.worker.models.specs.decoder_spec import Mamba2Spec, MambaSpec

BLOCK_COLUMNS = 8  # of a matrix, that a warp has
BLOCK_CHANNELS = 32  # of Mamba, likewise: its states are smaller


@dataclass(frozen=True)
class SsmHeads:
    """What heads have learned, [heads], fp32; Mamba's channels, [channels]."""

    dt_bias: Tensor
    decay: Tensor  # of Mamba [channels * state_size], those of a channel adjacent
    skip: Tensor


@dataclass(frozen=True)
class ScanSizes:
    """The sizes of a recurrence, as `scan_kernel` has them."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    heads_per_group: int = 1
    first_head: int = 0  # in its group
    of_channels: bool = False


def scan_ssm(
    mamba2: Mamba2Spec, xbc: Tensor, dt: Tensor, heads: SsmHeads, states: Tensor, moves: StateMoves
) -> Tensor:
    """Return the output of heads, [tokens, heads, head_dim], fp32. That of padding is zeros.

    Args:
        xbc: [tokens, inner_size + 2 * group_numbers], x, B and C, convolved.
        dt: [tokens, heads], before the multiplier and the bias; rows may lie apart.
        states: [slots, numbers], fp32, slots may lie apart.
    """
    sizes = ScanSizes(
        len(mamba2.heads),
        mamba2.head_dim,
        mamba2.state_size,
        len(mamba2.groups),
        mamba2.heads_per_group,
        mamba2.heads.start % mamba2.heads_per_group,
    )
    x, of_groups = xbc[:, : mamba2.inner_size], xbc[:, mamba2.inner_size :]
    return scan(sizes, x, of_groups, dt, heads, states, moves, mamba2.multipliers[4])


def scan_channels(
    mamba: MambaSpec,
    x: Tensor,
    bc: Tensor,
    dt: Tensor,
    channels: SsmHeads,
    states: Tensor,
    moves: StateMoves,
) -> Tensor:
    """Return the output of Mamba's channels, [tokens, 1, channels], fp32. Padding has zeros.

    Args:
        x: [tokens, channels], convolved.
        bc: [tokens, 2 * state_size], B and C; its rows may lie apart, as those of x and dt.
        dt: [tokens, channels], before the bias.
        states: [slots, numbers], fp32, slots may lie apart.
    """
    sizes = ScanSizes(1, mamba.channels, mamba.state_size, of_channels=True)
    return scan(sizes, x, bc, dt, channels, states, moves, 1.0)


def scan(
    sizes: ScanSizes,
    x: Tensor,
    of_groups: Tensor,
    dt: Tensor,
    heads: SsmHeads,
    states: Tensor,
    moves: StateMoves,
    multiplier: float,
) -> Tensor:
    """Launch the kernel: return [tokens, heads, head_dim]."""
    shape = len(x), sizes.num_heads, sizes.head_dim
    assert x.stride(1) == of_groups.stride(1) == dt.stride(1) == states.stride(1) == 1
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    block = BLOCK_CHANNELS if sizes.of_channels else BLOCK_COLUMNS
    if len(x):
        grid = (moves.num_sequences + 1, sizes.num_heads, cdiv(sizes.head_dim, block))
        scan_kernel[grid](
            out,
            x,
            of_groups,
            dt,
            heads.dt_bias,
            heads.decay,
            heads.skip,
            states,
            moves.query_starts,
            moves.slots,
            x.stride(0),
            of_groups.stride(0),
            dt.stride(0),
            states.stride(0),
            multiplier,
            NUM_HEADS=sizes.num_heads,
            HEAD_DIM=sizes.head_dim,
            STATE_SIZE=sizes.state_size,
            NUM_GROUPS=sizes.num_groups,
            HEADS_PER_GROUP=sizes.heads_per_group,
            FIRST_HEAD=sizes.first_head,
            OF_CHANNELS=sizes.of_channels,
            BLOCK_ROWS=next_power_of_2(sizes.state_size),
            BLOCK=block,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def scan_kernel(
    out: tl.tensor,
    x: tl.tensor,
    of_groups: tl.tensor,
    dt: tl.tensor,
    dt_bias: tl.tensor,
    decays: tl.tensor,
    skips: tl.tensor,
    states: tl.tensor,
    query_starts: tl.tensor,
    slots: tl.tensor,
    x_stride: tl.tensor,
    group_stride: tl.tensor,
    dt_stride: tl.tensor,
    state_stride: tl.tensor,
    multiplier: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    OF_CHANNELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    INNER: tl.constexpr = NUM_HEADS * HEAD_DIM
    row, column = tl.arange(0, BLOCK_ROWS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_column = row < STATE_SIZE, column < HEAD_DIM
    reads = out + head * HEAD_DIM + column
    if sequence == tl.num_programs(0) - 1:
        clear_rows(reads, INNER, start, end, is_column)
        return
    if start >= end:
        return
    source, target, state_end = load_move(slots, sequence)
    is_number = is_row[:, None] & is_column[None, :]
    place = states + (head * STATE_SIZE * HEAD_DIM + row[:, None] * HEAD_DIM + column[None, :])
    state = load_state(place, source, state_stride, is_number)
    group = (FIRST_HEAD + head) // HEADS_PER_GROUP
    first = start.to(tl.int64)
    inputs = x + first * x_stride + head * HEAD_DIM + column
    of_groups += first * group_stride + group * STATE_SIZE + row
    reads += first * INNER
    if OF_CHANNELS:
        of_channels = decays + column[None, :] * STATE_SIZE + row[:, None]
        decay = tl.load(of_channels, mask=is_number, other=0.0)
        bias = tl.load(dt_bias + column, mask=is_column, other=0.0)
        skip = tl.load(skips + column, mask=is_column, other=0.0)
        dt += first * dt_stride + column
    else:
        bias, decay, skip = tl.load(dt_bias + head), tl.load(decays + head), tl.load(skips + head)
        dt += first * dt_stride + head
    for token in tl.range(start, end, num_stages=4):
        b = tl.load(of_groups, mask=is_row, other=0.0).to(tl.float32)
        c = tl.load(of_groups + NUM_GROUPS * STATE_SIZE, mask=is_row, other=0.0).to(tl.float32)
        number = tl.load(inputs, mask=is_column, other=0.0).to(tl.float32)
        if OF_CHANNELS:
            step = softplus(tl.load(dt, mask=is_column, other=0.0).to(tl.float32) + bias)
            state *= tl.exp(step[None, :] * decay)
        else:
            step = softplus(multiplier * tl.load(dt).to(tl.float32) + bias)
            state *= tl.exp(step * decay)
        state += b[:, None] * (step * number)[None, :]
        if (token + 1 == state_end) & (target >= 0):
            tl.store(place + target * state_stride, state, mask=is_number)
        tl.store(reads, tl.sum(state * c[:, None], 0) + skip * number, mask=is_column)
        inputs, of_groups = inputs + x_stride, of_groups + group_stride
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


def channels_reference(
    mamba: MambaSpec,
    x: Tensor,
    bc: Tensor,
    dt: Tensor,
    channels: SsmHeads,
    states: Tensor,
    moves: StateMoves,
) -> Tensor:
    """Do as `scan_channels`, in plain torch."""
    numbers, (b, c) = x.float(), bc.float().chunk(2, 1)
    steps = F.softplus(dt.float() + channels.dt_bias)
    decay = channels.decay.view(mamba.channels, mamba.state_size)
    out = torch.zeros_like(numbers)

    def run(rows: slice, before: Tensor) -> Tensor:
        vectors = before.view(mamba.state_size, mamba.channels).T
        for i in range(rows.start, rows.stop):
            moved_by = torch.outer(steps[i] * numbers[i], b[i])
            vectors = vectors * torch.exp(steps[i][:, None] * decay) + moved_by
            out[i] = vectors @ c[i] + channels.skip * numbers[i]
        return vectors.T.flatten()

    moved(states, moves, run)
    return out[:, None]
