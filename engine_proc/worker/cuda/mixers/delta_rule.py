"""Kimi's delta rule over a step's tokens, behind the states of their sequences.

Each row of a matrix decays by itself: within a block of tokens nothing can be divided by decays.

A program has some columns of a head's matrix in registers, and goes through a sequence's tokens one
after the other: chunks change no bits. The state is fp32, [value_heads, key_dim, value_dim].
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
from headrace.engine_proc.worker.models.specs.decoder_spec import GatedDeltaNetSpec
from headrace.engine_proc.worker.reference.torch_delta_net import (
    L2_EPS,
    DeltaTokens,
    delta_rule,
    of_length_one,
)

BLOCK_COLUMNS = 8  # of a matrix, that a warp has


@dataclass(frozen=True)
class DeltaGates:
    """What decides how far a token changes its heads' matrices."""

    betas: Tensor  # [tokens, value_heads], before the sigmoid
    steps: Tensor  # [tokens, decays], before the bias and the softplus; rows of both may lie apart
    bias: Tensor  # [decays], fp32
    rates: Tensor  # [value_heads], fp32


def apply_delta_rule(
    delta: GatedDeltaNetSpec, qkv: Tensor, gates: DeltaGates, states: Tensor, moves: StateMoves
) -> Tensor:
    """Return what heads read of their matrices, [tokens, value_heads, value_dim], fp32.

    Padding reads zeros.

    Args:
        qkv: [tokens, 2 * key_width + value_width], convolved; of no length yet.
        states: [slots, numbers], fp32, slots may lie apart.
    """
    assert qkv.is_contiguous()
    assert gates.betas.stride(1) == gates.steps.stride(1) == states.stride(1) == 1
    shape = len(qkv), delta.num_value_heads, delta.value_dim
    read = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    grid = (moves.num_sequences + 1, delta.num_value_heads, cdiv(delta.value_dim, BLOCK_COLUMNS))
    if len(qkv):
        delta_kernel[grid](
            read,
            qkv,
            gates.betas,
            gates.steps,
            gates.bias,
            gates.rates,
            states,
            moves.query_starts,
            moves.slots,
            gates.betas.stride(0),
            gates.steps.stride(0),
            states.stride(0),
            delta.key_dim**-0.5,
            L2_EPS,
            KEY_HEADS=delta.num_key_heads,
            VALUE_HEADS=delta.num_value_heads,
            KEY_DIM=delta.key_dim,
            VALUE_DIM=delta.value_dim,
            IS_TILED=delta.is_tiled,
            BLOCK_ROWS=next_power_of_2(delta.key_dim),
            BLOCK=BLOCK_COLUMNS,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return read


@triton.jit
def delta_kernel(
    read: tl.tensor,
    qkv: tl.tensor,
    betas: tl.tensor,
    steps: tl.tensor,
    bias: tl.tensor,
    rates: tl.tensor,
    states: tl.tensor,
    query_starts: tl.tensor,
    slots: tl.tensor,
    beta_stride: tl.tensor,
    step_stride: tl.tensor,
    state_stride: tl.tensor,
    query_scale: tl.tensor,
    eps: tl.tensor,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_TILED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    row, column = tl.arange(0, BLOCK_ROWS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_column = row < KEY_DIM, column < VALUE_DIM
    out = read + head * VALUE_DIM + column
    if sequence == tl.num_programs(0) - 1:
        clear_rows(out, VALUE_HEADS * VALUE_DIM, start, end, is_column)
        return
    if start >= end:
        return
    source, target, state_end = load_move(slots, sequence)
    is_number = is_row[:, None] & is_column[None, :]
    place = states + (head * KEY_DIM * VALUE_DIM + row[:, None] * VALUE_DIM + column[None, :])
    state = load_state(place, source, state_stride, is_number)
    key_head = head % KEY_HEADS if IS_TILED else head // (VALUE_HEADS // KEY_HEADS)
    KEY_WIDTH: tl.constexpr = KEY_HEADS * KEY_DIM
    WIDTH: tl.constexpr = 2 * KEY_WIDTH + VALUE_HEADS * VALUE_DIM
    rate, first = tl.load(rates + head), start.to(tl.int64)
    queries = qkv + first * WIDTH + key_head * KEY_DIM + row
    values = qkv + first * WIDTH + 2 * KEY_WIDTH + head * VALUE_DIM + column
    out += first * (VALUE_HEADS * VALUE_DIM)
    betas += first * beta_stride + head
    steps += first * step_stride + head * KEY_DIM + row
    added = tl.load(bias + head * KEY_DIM + row, mask=is_row, other=0.0)
    for token in tl.range(start, end, num_stages=4):
        query = of_length(queries, is_row, query_scale, eps)
        key = of_length(queries + KEY_WIDTH, is_row, 1.0, eps)
        value = tl.load(values, mask=is_column, other=0.0).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(betas).to(tl.float32)))
        step = tl.load(steps, mask=is_row, other=0.0).to(tl.float32) + added
        state *= tl.exp(rate * softplus(step))[:, None]
        wrong = value - tl.sum(state * key[:, None], 0)
        state += key[:, None] * (wrong * beta)[None, :]
        if (token + 1 == state_end) & (target >= 0):
            tl.store(place + target * state_stride, state, mask=is_number)
        tl.store(out, tl.sum(state * query[:, None], 0), mask=is_column)
        queries, values, out = queries + WIDTH, values + WIDTH, out + VALUE_HEADS * VALUE_DIM
        betas, steps = betas + beta_stride, steps + step_stride


@triton.jit
def of_length(place: tl.tensor, is_row: tl.tensor, length: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """Load a head, and make it so long."""
    head = tl.load(place, mask=is_row, other=0.0).to(tl.float32)
    return head * (length / tl.sqrt(tl.sum(head * head, 0) + eps))


def reference(
    delta: GatedDeltaNetSpec, qkv: Tensor, gates: DeltaGates, states: Tensor, moves: StateMoves
) -> Tensor:
    """Do as `apply_delta_rule`, in plain torch."""
    shape = len(qkv), delta.num_value_heads, delta.value_dim
    read = torch.zeros(shape, device=qkv.device)
    width = delta.key_width
    queries, keys = (
        of_length_one(part.float().view(len(qkv), -1, delta.key_dim))
        for part in (qkv[:, :width], qkv[:, width : 2 * width])
    )
    values = qkv[:, 2 * width :].float().view(shape)
    steps = F.softplus(gates.steps.float() + gates.bias).view(*shape[:2], -1)
    decays, betas = torch.exp(gates.rates[:, None] * steps), gates.betas.float().sigmoid()

    def run(rows: slice, before: Tensor) -> Tensor:
        tokens = DeltaTokens(qkv[rows], decays[rows], betas[rows])
        matrices = before.view(-1, delta.key_dim, delta.value_dim)
        read[rows], after = delta_rule(
            delta, queries[rows], keys[rows], values[rows], tokens, matrices
        )
        return after.flatten()

    moved(states, moves, run)
    return read
