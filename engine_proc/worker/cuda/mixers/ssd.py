"""The recurrence of Mamba-2 over a step's tokens, in blocks, behind the states of their sequences.

A program has some columns of a head's matrix, and goes through a sequence's blocks one after the
other; see `token_blocks.py`. Matrices are fp32, [heads, state_size, head_dim].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.kernels.numerics import (
    cdiv,
    next_power_of_2,
)
from headrace.engine_proc.worker.cuda.mixers import token_blocks
from headrace.engine_proc.worker.cuda.mixers.ssm_scan import SsmHeads
from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves
from headrace.engine_proc.worker.cuda.mixers.token_blocks import (
    BLOCK_COLUMNS,
    NUM_STAGES,
    TOKENS,
    Recurrence,
    advance,
    decays_within,
    dot_rows,
    find_part,
    kept_rows,
    load_matrix,
    load_rows,
    load_span,
    load_steps,
    num_warps,
    read_block,
    row_sizes,
    store,
)
from headrace.engine_proc.worker.models.specs.decoder_spec import Mamba2Spec


def scan_ssm(
    mamba2: Mamba2Spec, xbc: Tensor, dt: Tensor, heads: SsmHeads, states: Tensor, moves: StateMoves
) -> Tensor:
    """Return the output of heads, [tokens, heads, head_dim], fp32. That of padding is zeros.

    Args:
        xbc: [tokens, inner_size + 2 * group_numbers], x, B and C, convolved.
        dt: [tokens, heads], before the multiplier and the bias; rows may lie apart.
        states: [slots, numbers], fp32, slots may lie apart; rows of a block's tokens are last.
    """
    assert xbc.is_contiguous()
    assert dt.stride(1) == states.stride(1) == 1
    num_heads, sizes = len(mamba2.heads), row_sizes(mamba2)
    assert sizes is not None
    kept = kept_rows(sizes, states, xbc.dtype)
    shape = len(xbc), num_heads, mamba2.head_dim
    block_rows = max(next_power_of_2(mamba2.state_size), 16)
    out = torch.empty(shape, dtype=torch.float32, device=xbc.device)
    if len(xbc):
        grid = (moves.num_sequences + 1, num_heads, cdiv(mamba2.head_dim, BLOCK_COLUMNS))
        ssd_kernel[grid](
            out,
            xbc,
            dt,
            heads.dt_bias,
            heads.decay,
            heads.skip,
            states,
            kept.steps,
            kept.keys,
            kept.values,
            moves.query_starts,
            moves.positions,
            moves.slots,
            dt.stride(0),
            *kept.strides,
            mamba2.multipliers[4],
            NUM_HEADS=num_heads,
            HEAD_DIM=mamba2.head_dim,
            STATE_SIZE=mamba2.state_size,
            NUM_GROUPS=len(mamba2.groups),
            HEADS_PER_GROUP=mamba2.heads_per_group,
            FIRST_HEAD=mamba2.heads.start % mamba2.heads_per_group,
            BLOCK_ROWS=block_rows,
            BLOCK=BLOCK_COLUMNS,
            num_warps=num_warps(block_rows),
            num_stages=NUM_STAGES,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def ssd_kernel(
    out: tl.tensor,
    xbc: tl.tensor,
    dt: tl.tensor,
    dt_bias: tl.tensor,
    decays: tl.tensor,
    skips: tl.tensor,
    states: tl.tensor,
    kept_steps: tl.tensor,
    kept_keys: tl.tensor,
    kept_values: tl.tensor,
    query_starts: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    dt_stride: tl.tensor,
    state_stride: tl.tensor,
    kept_stride: tl.tensor,
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
    INNER: tl.constexpr = NUM_HEADS * HEAD_DIM
    KEYS: tl.constexpr = NUM_GROUPS * STATE_SIZE
    sequence, head, start, end, row, column, is_row, is_column = find_part(
        out, query_starts, INNER, STATE_SIZE, HEAD_DIM, BLOCK_ROWS, BLOCK
    )
    if start >= end:
        return
    token = tl.arange(0, TOKENS)
    source, target, known, first, last, behind = load_span(slots, positions, sequence, start, end)
    state, place = load_matrix(
        states, source, state_stride, head, row, column, STATE_SIZE, HEAD_DIM
    )
    group = (FIRST_HEAD + head) // HEADS_PER_GROUP
    first_head = tl.maximum(group * HEADS_PER_GROUP - FIRST_HEAD, 0)
    is_kept_row = row < tl.where((tl.program_id(2) == 0) & (head == first_head), STATE_SIZE, 0)
    kept_from, kept_to = source * kept_stride, target * kept_stride
    kept_steps += token * NUM_HEADS + head
    kept_keys += token[:, None] * KEYS + group * STATE_SIZE + row[None, :]
    kept_values += token[:, None] * INNER + head * HEAD_DIM + column[None, :]
    bias, decay, skip = tl.load(dt_bias + head), tl.load(decays + head), tl.load(skips + head)
    for begin in range(first // TOKENS * TOKENS, last, TOKENS):
        position = begin + token
        is_kept, is_new = position < known, (position >= first) & (position < last)
        at = (start + position - first).to(tl.int64)
        rows = xbc + (at * (INNER + 2 * KEYS))[:, None]
        of_group = rows + INNER + group * STATE_SIZE + row[None, :]
        keys = load_rows(kept_keys + kept_from, of_group, is_kept, is_new, is_row)
        queries = tl.load(of_group + KEYS, mask=is_new[:, None] & is_row[None, :], other=0.0)
        own = rows + head * HEAD_DIM + column[None, :]
        values = load_rows(kept_values + kept_from, own, is_kept, is_new, is_column)
        own_steps, before = dt + at * dt_stride + head, kept_steps + source * state_stride
        step = load_steps(before, own_steps, is_kept, is_new, multiplier, bias)
        logs, weights = decays_within(step * decay, token)
        weights *= dot_rows(queries, keys) * step[None, :]
        read = read_block(queries, state, logs, weights, values)
        read += skip * values.to(tl.float32)
        reader = out + (at * INNER)[:, None] + head * HEAD_DIM + column[None, :]
        store(reader, read, is_new, is_column)
        if (target >= 0) & (begin == behind // TOKENS * TOKENS):
            store(place + target * state_stride, state, is_row, is_column)
            is_left = position < behind
            store(kept_values + kept_to, values, is_left, is_column)
            store(kept_keys + kept_to, keys, is_left, is_kept_row)
            tl.store(kept_steps + target * state_stride, step, mask=is_left)
        if begin + TOKENS <= last:
            state = advance(state, keys, values, logs, step, token)
    if (target >= 0) & (behind == last) & (behind % TOKENS == 0):
        store(place + target * state_stride, state, is_row, is_column)


class Ssd(Recurrence):
    """Mamba-2's recurrence over a step's tokens, in plain torch."""

    def __init__(self, mamba2: Mamba2Spec, xbc: Tensor, dt: Tensor, heads: SsmHeads) -> None:
        widths = mamba2.inner_size, mamba2.group_numbers, mamba2.group_numbers
        self._x, self._keys, self._queries = xbc.split_with_sizes(widths, 1)
        self._steps = F.softplus(mamba2.multipliers[4] * dt.float() + heads.dt_bias)
        self._heads, self._shape = heads, (-1, mamba2.state_size)
        self._groups = [own // mamba2.heads_per_group - mamba2.groups.start for own in mamba2.heads]
        self.out = torch.zeros(len(xbc), len(mamba2.heads), mamba2.head_dim, device=xbc.device)

    def row(self, token: int, matrices: Tensor) -> list[Tensor]:
        return [self._steps[token], self._keys[token], self._x[token]]

    def add(self, matrices: Tensor, step: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        x, b = values.float().view(len(step), -1), keys.float().view(self._shape)[self._groups]
        decays = torch.exp(step * self._heads.decay)
        decayed = matrices.view(*b.shape, -1) * decays[:, None, None]
        return (decayed + torch.einsum("h,hn,hp->hnp", step, b, x)).flatten()

    def read(self, token: int, matrices: Tensor) -> None:
        c = self._queries[token].float().view(self._shape)[self._groups]
        read = torch.einsum("hn,hnp->hp", c, matrices.view(*c.shape, -1))
        self.out[token] = read + self._heads.skip[:, None] * self._x[token].view(read.shape)


def reference(
    mamba2: Mamba2Spec, xbc: Tensor, dt: Tensor, heads: SsmHeads, states: Tensor, moves: StateMoves
) -> Tensor:
    """Do as `scan_ssm`, in plain torch."""
    recurrence, sizes = Ssd(mamba2, xbc, dt, heads), row_sizes(mamba2)
    assert sizes is not None
    token_blocks.reference(recurrence, sizes, states, moves, xbc.dtype)
    return recurrence.out
