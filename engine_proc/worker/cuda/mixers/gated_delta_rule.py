"""The gated delta rule over a step's tokens, in blocks, behind the states of their sequences.

A program has some columns of a head's matrix, and goes through a sequence's blocks one after the
other; see `token_blocks.py`. Within a block each token's addition depends on those before it, and
tokens behind the block's beginning are kept with what they have added. Matrices are fp32,
[value_heads, key_dim, value_dim].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.kernels.numerics import (
    cdiv,
    next_power_of_2,
    rounded,
)
from headrace.engine_proc.worker.cuda.mixers import token_blocks
from headrace.engine_proc.worker.cuda.mixers.delta_rule import DeltaGates
from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves
from headrace.engine_proc.worker.cuda.mixers.token_blocks import (
    BLOCK_COLUMNS,
    NUM_STAGES,
    TOKENS,
    Recurrence,
    advance,
    decays_within,
    dot_rows,
    dot_wide,
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
from headrace.engine_proc.worker.models.specs.decoder_spec import GatedDeltaNetSpec
from headrace.engine_proc.worker.reference.torch_delta_net import L2_EPS, of_length_one

EPS = tl.constexpr(L2_EPS)


def apply_gated_delta_rule(
    delta: GatedDeltaNetSpec, qkv: Tensor, gates: DeltaGates, states: Tensor, moves: StateMoves
) -> Tensor:
    """Return what heads read of their matrices, [tokens, value_heads, value_dim], fp32.

    Padding reads zeros.

    Args:
        qkv: [tokens, 2 * key_width + value_width], convolved; of no length yet.
        states: [slots, numbers], fp32, slots may lie apart; rows of a block's tokens are last.
    """
    assert qkv.is_contiguous()
    assert gates.betas.stride(1) == gates.steps.stride(1) == states.stride(1) == 1
    sizes = row_sizes(delta)
    assert sizes is not None
    kept = kept_rows(sizes, states, qkv.dtype)
    shape = len(qkv), delta.num_value_heads, delta.value_dim
    block_rows = max(next_power_of_2(delta.key_dim), 16)
    read = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    grid = (moves.num_sequences + 1, delta.num_value_heads, cdiv(delta.value_dim, BLOCK_COLUMNS))
    if len(qkv):
        delta_block_kernel[grid](
            read,
            qkv,
            gates.betas,
            gates.steps,
            gates.bias,
            gates.rates,
            states,
            kept.steps,
            kept.keys,
            kept.values,
            moves.query_starts,
            moves.positions,
            moves.slots,
            gates.betas.stride(0),
            gates.steps.stride(0),
            *kept.strides,
            KEY_HEADS=delta.num_key_heads,
            VALUE_HEADS=delta.num_value_heads,
            KEY_DIM=delta.key_dim,
            VALUE_DIM=delta.value_dim,
            IS_TILED=delta.is_tiled,
            BLOCK_ROWS=block_rows,
            BLOCK=BLOCK_COLUMNS,
            num_warps=num_warps(block_rows),
            num_stages=NUM_STAGES,
            enable_fp_fusion=False,
        )
    return read


@triton.jit
def delta_block_kernel(
    read: tl.tensor,
    qkv: tl.tensor,
    betas: tl.tensor,
    steps: tl.tensor,
    bias: tl.tensor,
    rates: tl.tensor,
    states: tl.tensor,
    kept_steps: tl.tensor,
    kept_keys: tl.tensor,
    kept_values: tl.tensor,
    query_starts: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    beta_stride: tl.tensor,
    step_stride: tl.tensor,
    state_stride: tl.tensor,
    kept_stride: tl.tensor,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_TILED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    sequence, head, start, end, row, column, is_row, is_column = find_part(
        read, query_starts, VALUES, KEY_DIM, VALUE_DIM, BLOCK_ROWS, BLOCK
    )
    if start >= end:
        return
    token = tl.arange(0, TOKENS)
    source, target, known, first, last, behind = load_span(slots, positions, sequence, start, end)
    state, place = load_matrix(states, source, state_stride, head, row, column, KEY_DIM, VALUE_DIM)
    key_head = head % KEY_HEADS if IS_TILED else head // (VALUE_HEADS // KEY_HEADS)
    first_head = key_head if IS_TILED else key_head * (VALUE_HEADS // KEY_HEADS)
    is_kept_row = row < tl.where((tl.program_id(2) == 0) & (head == first_head), KEY_DIM, 0)
    kept_from, kept_to = source * kept_stride, target * kept_stride
    kept_steps += token * VALUE_HEADS + head
    kept_keys += token[:, None] * KEYS + key_head * KEY_DIM + row[None, :]
    kept_values += token[:, None] * VALUES + head * VALUE_DIM + column[None, :]
    rate, added = tl.load(rates + head), tl.load(bias + head)
    for begin in range(first // TOKENS * TOKENS, last, TOKENS):
        position = begin + token
        is_kept, is_new = position < known, (position >= first) & (position < last)
        at = (start + position - first).to(tl.int64)
        rows = qkv + (at * (2 * KEYS + VALUES))[:, None]
        of_head = rows + key_head * KEY_DIM + row[None, :]
        queries = tl.load(of_head, mask=is_new[:, None] & is_row[None, :], other=0.0)
        keys = load_rows(kept_keys + kept_from, of_head + KEYS, is_kept, is_new, is_row)
        of_values = rows + 2 * KEYS + head * VALUE_DIM + column[None, :]
        values = load_rows(kept_values + kept_from, of_values, is_kept, is_new, is_column)
        own_steps, before = steps + at * step_stride + head, kept_steps + source * state_stride
        step = load_steps(before, own_steps, is_kept, is_new, 1.0, added)
        logs, weights = decays_within(step * rate, token)
        beta = load_beta(betas + at * beta_stride + head, is_new)
        factors = inverse_lengths(keys)
        weights *= factors[None, :]
        values = added_in_turn(
            keys, values, state, logs, weights, beta, factors, token, first - begin, last - begin
        )
        out = read_block(queries, state, logs, weights * dot_rows(queries, keys), values)
        out *= (inverse_lengths(queries) * KEY_DIM**-0.5)[:, None]
        reader = read + (at * VALUES)[:, None] + head * VALUE_DIM + column[None, :]
        store(reader, out, is_new, is_column)
        if (target >= 0) & (begin == behind // TOKENS * TOKENS):
            store(place + target * state_stride, state, is_row, is_column)
            store(kept_values + kept_to, values, position < behind, is_column)
            store(kept_keys + kept_to, keys, position < behind, is_kept_row)
            tl.store(kept_steps + target * state_stride, step, mask=position < behind)
        if begin + TOKENS <= last:
            state = advance(state, keys, values, logs, factors, token)
    if (target >= 0) & (behind == last) & (behind % TOKENS == 0):
        store(place + target * state_stride, state, is_row, is_column)


@triton.jit
def inverse_lengths(rows: tl.tensor) -> tl.tensor:
    """Return what makes rows one long, [rows]."""
    numbers = rows.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(numbers * numbers, 1) + EPS)


@triton.jit
def load_beta(place: tl.tensor, is_new: tl.tensor) -> tl.tensor:
    """Load how much of what tokens lack they add, [tokens]."""
    return 1.0 / (1.0 + tl.exp(-tl.load(place, mask=is_new, other=0.0).to(tl.float32)))


@triton.jit
def added_in_turn(
    keys: tl.tensor,
    values: tl.tensor,
    state: tl.tensor,
    logs: tl.tensor,
    weights: tl.tensor,
    beta: tl.tensor,
    factors: tl.tensor,
    token: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
) -> tl.tensor:
    """Return what a block's tokens add, [tokens, columns], each given those before it.

    Args:
        keys: of no length yet, and `factors`, which give them one.
        values: of tokens before `first` what they have added.
        logs, weights: of decays, and of what earlier tokens have added.
        first, last: the tokens of this step.
    """
    found = dot_wide(keys, state, tl.zeros(values.shape, tl.float32))
    lacking = beta[:, None] * (values.to(tl.float32) - found * (factors * tl.exp(logs))[:, None])
    added = tl.where((token >= first)[:, None], lacking, values.to(tl.float32))
    lower = dot_rows(keys, keys) * weights * (beta * factors)[:, None]
    lower = tl.where(token[:, None] > token[None, :], lower, 0.0)
    for own in range(tl.maximum(first, 0), tl.minimum(last, token.shape[0])):
        is_own = (token == own)[:, None]
        found_before = tl.sum(tl.where(is_own, lower, 0.0), 0)[:, None] * added
        number = rounded(added - tl.sum(found_before, 0)[None, :], values.dtype)
        added = tl.where(is_own, number.to(tl.float32), added)
    return added.to(values.dtype)


class DeltaRule(Recurrence):
    """The gated delta rule over a step's tokens, in plain torch."""

    def __init__(self, delta: GatedDeltaNetSpec, qkv: Tensor, gates: DeltaGates) -> None:
        widths = delta.key_width, delta.key_width, delta.value_width
        self._queries, self._keys, self._values = qkv.split_with_sizes(widths, 1)
        self._steps = F.softplus(gates.steps.float() + gates.bias)
        self._betas, self._rates = gates.betas.float().sigmoid(), gates.rates
        heads, sharing = range(delta.num_value_heads), delta.num_value_heads // delta.num_key_heads
        of_tiles, of_neighbors = (
            [h % delta.num_key_heads for h in heads],
            [h // sharing for h in heads],
        )
        self._key_heads = of_tiles if delta.is_tiled else of_neighbors
        self._key_dim = delta.key_dim
        self.out = torch.zeros(len(qkv), len(heads), delta.value_dim, device=qkv.device)

    def row(self, token: int, matrices: Tensor) -> list[Tensor]:
        step, keys, values = self._steps[token], self._keys[token], self._values[token]
        decayed = self._decayed(matrices, step)
        wrong = values.float().view(len(step), -1) - self._found(decayed, keys)
        added = wrong * self._betas[token][:, None]
        return [step, keys, added.to(values.dtype).flatten()]

    def add(self, matrices: Tensor, step: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        added = self._heads_of(keys)[:, :, None] * values.float().view(len(step), 1, -1)
        return (self._decayed(matrices, step) + added).flatten()

    def read(self, token: int, matrices: Tensor) -> None:
        found = self._found(
            matrices.view(len(self._rates), self._key_dim, -1), self._queries[token]
        )
        self.out[token] = found / self._key_dim**0.5

    def _heads_of(self, keys: Tensor) -> Tensor:
        return of_length_one(keys.float().view(-1, self._key_dim))[self._key_heads]

    def _decayed(self, matrices: Tensor, step: Tensor) -> Tensor:
        matrices = matrices.view(len(step), self._key_dim, -1)
        return matrices * torch.exp(self._rates * step)[:, None, None]

    def _found(self, matrices: Tensor, keys: Tensor) -> Tensor:
        return torch.einsum("hk,hkv->hv", self._heads_of(keys), matrices)


def reference(
    delta: GatedDeltaNetSpec, qkv: Tensor, gates: DeltaGates, states: Tensor, moves: StateMoves
) -> Tensor:
    """Do as `apply_gated_delta_rule`, in plain torch."""
    recurrence, sizes = DeltaRule(delta, qkv, gates), row_sizes(delta)
    assert sizes is not None
    token_blocks.reference(recurrence, sizes, states, moves, qkv.dtype)
    return recurrence.out
