"""The recurrence of Mamba over a step's tokens, behind the states of their sequences.

A program has some channels' vectors in registers, and goes through a sequence's tokens one after
the other: chunks change no bits. The state is fp32, [state_size, channels]. Each channel has steps,
and each number of its vector decays of its own.
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
from headrace.engine_proc.worker.models.specs.decoder_spec import MambaSpec

BLOCK_CHANNELS = 32  # that a warp has


@dataclass(frozen=True)
class SsmHeads:
    """What heads have learned, [heads], fp32; Mamba's channels, [channels]."""

    dt_bias: Tensor
    decay: Tensor  # of Mamba [channels * state_size], those of a channel adjacent
    skip: Tensor


def scan_channels(
    mamba: MambaSpec,
    x: Tensor,
    bc: Tensor,
    dt: Tensor,
    channels: SsmHeads,
    states: Tensor,
    moves: StateMoves,
) -> Tensor:
    """Return the output of Mamba's channels, [tokens, channels], fp32. Padding has zeros.

    Args:
        x: [tokens, channels], convolved.
        bc: [tokens, 2 * state_size], B and C; its rows may lie apart, as those of x and dt.
        dt: [tokens, channels], before the bias.
        states: [slots, numbers], fp32, slots may lie apart.
    """
    assert x.stride(1) == bc.stride(1) == dt.stride(1) == states.stride(1) == 1
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if len(x):
        scan_kernel[(moves.num_sequences + 1, cdiv(mamba.channels, BLOCK_CHANNELS))](
            out,
            x,
            bc,
            dt,
            channels.dt_bias,
            channels.decay,
            channels.skip,
            states,
            moves.query_starts,
            moves.slots,
            x.stride(0),
            bc.stride(0),
            dt.stride(0),
            states.stride(0),
            CHANNELS=mamba.channels,
            STATE_SIZE=mamba.state_size,
            BLOCK_ROWS=next_power_of_2(mamba.state_size),
            BLOCK=BLOCK_CHANNELS,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def scan_kernel(
    out: tl.tensor,
    x: tl.tensor,
    bc: tl.tensor,
    dt: tl.tensor,
    dt_bias: tl.tensor,
    decays: tl.tensor,
    skips: tl.tensor,
    states: tl.tensor,
    query_starts: tl.tensor,
    slots: tl.tensor,
    x_stride: tl.tensor,
    bc_stride: tl.tensor,
    dt_stride: tl.tensor,
    state_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    row, column = tl.arange(0, BLOCK_ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_column = row < STATE_SIZE, column < CHANNELS
    reads = out + column
    if sequence == tl.num_programs(0) - 1:
        clear_rows(reads, CHANNELS, start, end, is_column)
        return
    if start >= end:
        return
    source, target, state_end = load_move(slots, sequence)
    is_number = is_row[:, None] & is_column[None, :]
    place = states + (row[:, None] * CHANNELS + column[None, :])
    state = load_state(place, source, state_stride, is_number)
    first = start.to(tl.int64)
    inputs = x + first * x_stride + column
    bc += first * bc_stride + row
    dt += first * dt_stride + column
    reads += first * CHANNELS
    of_channels = decays + column[None, :] * STATE_SIZE + row[:, None]
    decay = tl.load(of_channels, mask=is_number, other=0.0)
    bias = tl.load(dt_bias + column, mask=is_column, other=0.0)
    skip = tl.load(skips + column, mask=is_column, other=0.0)
    for token in tl.range(start, end, num_stages=4):
        b = tl.load(bc, mask=is_row, other=0.0).to(tl.float32)
        c = tl.load(bc + STATE_SIZE, mask=is_row, other=0.0).to(tl.float32)
        number = tl.load(inputs, mask=is_column, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt, mask=is_column, other=0.0).to(tl.float32) + bias)
        state *= tl.exp(step[None, :] * decay)
        state += b[:, None] * (step * number)[None, :]
        if (token + 1 == state_end) & (target >= 0):
            tl.store(place + target * state_stride, state, mask=is_number)
        tl.store(reads, tl.sum(state * c[:, None], 0) + skip * number, mask=is_column)
        inputs, bc = inputs + x_stride, bc + bc_stride
        reads, dt = reads + CHANNELS, dt + dt_stride


def reference(
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
    return out
