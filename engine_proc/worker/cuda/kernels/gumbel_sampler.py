"""Draws a token for each row of logits: the same tokens as `csrc/sampling/sampler_row.cpp`.

The noise is that of the C++ sampler, a function of (seed, position, token), and numbers are
doubles as there. As there, most tokens need none: a bound says that they cannot win. Programs share
a row, slice by slice; the best of a row is the same in any order. Where top-k or top-p leaves so
few tokens that one program can hold them, that one draws.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv
from headrace.engine_proc.worker.cuda.kernels.row_limits import (
    filters_of,
    find_limits,
    room_for_limits,
)
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import comes_last, new_turns
from headrace.engine_proc.worker.cuda.kernels.top_k_top_p import (
    MINUS_INFINITY,
    load_block,
    logit_of,
    rank_of,
)
from headrace.engine_proc.worker.cuda.kernels.vocab_slices import (
    NUM_WARPS,
    block_of,
    find_likeliest,
    likeliest_of,
    slice_of,
)


@dataclass(frozen=True)
class Draws:
    """The fields of each `SamplingRow` that draw it, [rows]. Those of a size lie equally apart."""

    seed: Tensor  # int64, the bits of a u64
    position: Tensor  # the same
    temperature: Tensor  # fp32, 0 takes the likeliest
    top_k: Tensor  # int32, 0 is all
    top_p: Tensor  # fp32, 1 is all
    min_p: Tensor  # fp32, 0 is all


def draw(
    logits: Tensor,
    draws: Draws,
    out: Tensor | None = None,
    turns: Tensor | None = None,
    has_limits: bool = True,
) -> Tensor:
    """Return a token per row, [rows], int32. A row with nothing but minus infinity gets token 0.

    Args:
        logits: [rows, vocab_size], fp32, rows may lie apart; not changed.
        out: where to write them.
        turns: of `new_turns`, one for each row at least.
        has_limits: False if no row has top-k or top-p, which spares launches.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    wide, narrow = draws.seed.stride(0), draws.top_k.stride(0)
    assert draws.position.stride(0) == wide
    filters = draws.temperature, draws.top_k, draws.top_p, draws.min_p
    assert all(column.stride(0) == narrow for column in filters)
    tokens = logits.new_empty(num_rows, dtype=torch.int32) if out is None else out
    if num_rows:
        block, slice_size = block_of(vocab_size), slice_of(vocab_size)
        num_slices = cdiv(vocab_size, slice_size)
        highest, likeliest = find_likeliest(logits)
        turns = new_turns(num_rows, logits.device) if turns is None else turns
        if has_limits:
            found = find_limits(logits, highest, likeliest, filters, turns)
        else:
            found = room_for_limits(logits)
        draw_kernel[(num_rows, num_slices)](
            tokens,
            logits,
            highest,
            likeliest,
            logits.new_empty(num_rows, num_slices, dtype=torch.float64),
            logits.new_empty(num_rows, num_slices, dtype=torch.int32),
            turns,
            found.limits,
            found.num_left,
            found.left,
            logits.stride(0),
            draws.seed,
            draws.position,
            *filters,
            wide,
            narrow,
            VOCAB_SIZE=vocab_size,
            BLOCK=block,
            SLICE=slice_size,
            TOKEN_BITS=max(1, (vocab_size - 1).bit_length()),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return tokens


@triton.jit
def draw_kernel(
    tokens: tl.tensor,
    logits: tl.tensor,
    highest_of: tl.tensor,
    likeliest_in: tl.tensor,
    values: tl.tensor,
    winners: tl.tensor,
    turns: tl.tensor,
    limits: tl.tensor,
    num_left: tl.tensor,
    left: tl.tensor,
    stride: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    wide: tl.tensor,
    narrow: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> None:
    NUM_SLICES: tl.constexpr = (VOCAB_SIZE + SLICE - 1) // SLICE
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride
    highest, likeliest = likeliest_of(highest_of, likeliest_in, row, NUM_SLICES)
    is_greedy, k, p, inverse, floor = filters_of(
        temperatures, top_ks, top_ps, min_ps, row * narrow, highest, VOCAB_SIZE
    )
    limit, num = tl.zeros([], tl.uint64), tl.zeros([], tl.int32)
    if (is_greedy == 0) & ((k > 0) | (p < 1)):
        limit = tl.load(limits + row).to(tl.uint64, bitcast=True)
        num = tl.load(num_left + row)
    if (is_greedy | (num > 0)) & (index > 0):
        return
    if is_greedy:
        tl.store(tokens + row, likeliest)
        return
    key = key_of(seeds + row * wide, positions + row * wide)
    if num > 0:
        lane = tl.arange(0, BLOCK)
        own = left.to(tl.pointer_type(tl.uint64)) + row * BLOCK + lane
        ranks = tl.load(own, mask=lane < num, other=0)
        drawn = draw_among(ranks, limit, key, highest, inverse, floor, VOCAB_SIZE, TOKEN_BITS)
        tl.store(tokens + row, drawn)
        return
    start, place = index * SLICE, row * NUM_SLICES + index
    best, drawn = find_drawn(
        logits,
        start,
        tl.minimum(start + SLICE, VOCAB_SIZE),
        highest,
        likeliest,
        limit,
        key,
        inverse,
        floor,
        VOCAB_SIZE,
        BLOCK,
        TOKEN_BITS,
    )
    if NUM_SLICES > 1:
        tl.store(values + place, best)
        tl.store(winners + place, drawn)
        if not comes_last(turns, row, NUM_SLICES):
            return
        drawn = likeliest_of(values, winners, row, NUM_SLICES)[1]
    tl.store(tokens + row, drawn)


@triton.jit
def draw_among(
    ranks: tl.tensor,
    limit: tl.tensor,
    key: tl.tensor,
    highest: tl.tensor,
    inverse: tl.tensor,
    floor: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> tl.tensor:
    """Return the token that `find_drawn` would, of some ranks; one of them is the likeliest's."""
    highest_score = highest.to(tl.float64) * inverse
    token = VOCAB_SIZE - 1 - (ranks & ((1 << TOKEN_BITS) - 1)).to(tl.int32)
    score = logit_of(ranks, TOKEN_BITS).to(tl.float64) * inverse
    is_in = (ranks >= limit) & (score - highest_score >= floor)
    value = tl.where(is_in, score + noise_of(uniform_of(key, token)), MINUS_INFINITY)
    return tl.min(tl.where(value == tl.max(value, 0), token, VOCAB_SIZE), 0)


@triton.jit
def find_drawn(
    logits: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    highest: tl.tensor,
    likeliest: tl.tensor,
    limit: tl.tensor,
    key: tl.tensor,
    inverse: tl.tensor,
    floor: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the most that a token's score and noise add up to, and that token, the lower one among
    equals: of the likeliest, and of all from `start` to before `end`.

    A token can win only if 1 - u <= -log(u) <= exp(score - best). All others are skipped, block by
    block, by a bound in fp32 that leaves room for rounding. Blocks below the limit need no noise.
    """
    highest_score = highest.to(tl.float64) * inverse
    best = highest_score + noise_of(uniform_of(key, likeliest))
    drawn = likeliest
    for first in tl.range(start, end, BLOCK, num_stages=3):
        token, x = load_block(logits, first, VOCAB_SIZE, BLOCK)
        score = x.to(tl.float64) * inverse
        is_in = (token < VOCAB_SIZE) & (rank_of(x, token, VOCAB_SIZE, TOKEN_BITS) >= limit)
        is_in = is_in & (score - highest_score >= floor)
        is_any = limit == 0
        if limit > 0:  # else most blocks have some
            is_any = tl.max(is_in.to(tl.int32), 0) > 0
        if is_any:
            uniform = uniform_of(key, token)
            ahead = score - best + tl.abs(best) * 4.440892098500626e-16  # 2 ** -51
            reach = tl.exp(tl.minimum(ahead, 1.0).to(tl.float32)) * 1.001 + 1e-37
            can_win = is_in & ((1.0 - uniform).to(tl.float32) <= reach)
            if tl.max(can_win.to(tl.int32), 0) > 0:
                value = tl.where(can_win, score + noise_of(uniform), MINUS_INFINITY)
                of_block = tl.max(value, 0)
                winner = tl.min(tl.where(value == of_block, token, VOCAB_SIZE), 0)
                is_better = (of_block > best) | ((of_block == best) & (winner < drawn))
                drawn = tl.where(is_better, winner, drawn)
                best = tl.maximum(best, of_block)
    return best, drawn


@triton.jit
def key_of(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return what a row's random numbers follow from."""
    seed = tl.load(seed).to(tl.uint64, bitcast=True)
    return mix(mix(seed) + tl.load(position).to(tl.uint64, bitcast=True))


@triton.jit
def uniform_of(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Return a token's random number, between 0 and 1."""
    bits = mix(key + token.to(tl.uint64)) >> 12
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52


@triton.jit
def noise_of(uniform: tl.tensor) -> tl.tensor:
    """Return Gumbel noise."""
    return -tl.log(-tl.log(uniform))


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    """SplitMix64's step (Steele, Lea and Flood, 2014): a counter made into random bits."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def reference(logits: Tensor, draws: Draws) -> Tensor:
    """Do as `draw`, in plain torch, row by row."""
    tokens = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    logits = logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    for row, scores in enumerate(logits.double()):
        highest, likeliest = scores.max(), int((scores == scores.max()).nonzero()[0])
        if draws.temperature[row] <= 0 or not highest.isfinite():
            tokens[row] = likeliest
            continue
        scores = scores * (1 / draws.temperature[row].double())
        kept = candidates(scores, draws, row)
        key = mixed(mixed(draws.seed[row]) + draws.position[row])
        bits = shifted(mixed(key + kept), 12)
        noise = -((bits.double() + 0.5) * 2.0**-52).log().neg().log()
        values = scores[kept] + noise
        tokens[row] = kept[values == values.max()].min()
    return tokens


def candidates(scores: Tensor, draws: Draws, row: int) -> Tensor:
    """Return the tokens that min_p, top-k and top-p leave of a row."""
    order = scores.argsort(descending=True, stable=True)
    below = scores[order] - scores[order[0]]
    if draws.min_p[row] > 0:
        order = order[below >= draws.min_p[row].double().log()]
    if draws.top_k[row] > 0:
        order = order[: int(draws.top_k[row])]
    if draws.top_p[row] < 1:
        weights = below[: len(order)].exp().cumsum(0)
        num_below = int((weights < draws.top_p[row].double() * weights[-1]).sum())
        order = order[: num_below + 1]
    return order


def mixed(x: Tensor) -> Tensor:
    """Do as `mix`, in int64."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ shifted(x, 31)


def shifted(x: Tensor, num: int) -> Tensor:
    """Shift the bits of int64 to the right, zeros from the left."""
    return (x >> num) & ((1 << (64 - num)) - 1)
