"""Draws a token for each row of logits: the same tokens as `csrc/sampler_row.cpp`.

The noise is that of the C++ sampler, a function of (seed, position, token), and numbers are
doubles as there. What top-k and top-p leave is found without a sort: tokens are ordered by numbers
that no two have in common, and the limit above which there are enough is found bit by bit.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
MINUS_INFINITY = tl.constexpr(float("-inf"))
ORDER_BITS = tl.constexpr(32)  # of a logit
SIGN = tl.constexpr(0x80000000)


@dataclass(frozen=True)
class Draws:
    """How each row is drawn, [rows]."""

    seeds: Tensor  # int64, the bits of a u64
    positions: Tensor  # the same
    temperatures: Tensor  # fp32, 0 takes the likeliest
    top_k: Tensor  # int32, 0 is all
    top_p: Tensor  # fp32, 1 is all
    min_p: Tensor  # fp32, 0 is all


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """Return a token per row, [rows], int32. A row with nothing but minus infinity gets token 0.

    Args:
        logits: [rows, vocab_size], fp32, rows may lie apart; not changed.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        draw_kernel[(num_rows,)](
            tokens,
            logits,
            logits.stride(0),
            draws.seeds,
            draws.positions,
            draws.temperatures,
            1 / draws.temperatures.double(),
            draws.min_p.double().log().clamp(max=0),
            draws.top_k,
            draws.top_p.double(),
            VOCAB_SIZE=vocab_size,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)),
            TOKEN_BITS=max(1, (vocab_size - 1).bit_length()),
            enable_fp_fusion=False,
        )
    return tokens


@triton.jit
def draw_kernel(
    tokens: tl.tensor,
    logits: tl.tensor,
    stride: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    inverse_temperatures: tl.tensor,
    floors: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    highest, likeliest = find_likeliest(logits, VOCAB_SIZE, BLOCK)
    is_finite = (highest > MINUS_INFINITY) & (highest < -MINUS_INFINITY)
    if (tl.load(temperatures + row) <= 0) | (is_finite == 0):
        tl.store(tokens + row, likeliest)
        return
    inverse, floor = tl.load(inverse_temperatures + row), tl.load(floors + row)
    highest_score = highest.to(tl.float64) * inverse
    limit = tl.zeros([], tl.uint64)
    k, p = tl.load(top_ks + row), tl.load(top_ps + row)
    if (k > 0) & (k < VOCAB_SIZE):
        limit = find_limit(
            logits, limit, k.to(tl.float64), 0.0, 0.0, 0.0, VOCAB_SIZE, BLOCK, TOKEN_BITS, False
        )
    if p < 1:
        total = weigh(
            logits, limit, inverse, highest_score, floor, VOCAB_SIZE, BLOCK, TOKEN_BITS, True
        )
        limit = find_limit(
            logits,
            limit,
            p * total,
            inverse,
            highest_score,
            floor,
            VOCAB_SIZE,
            BLOCK,
            TOKEN_BITS,
            True,
        )
        best = rank_of(highest, likeliest, VOCAB_SIZE, TOKEN_BITS)
        limit = tl.minimum(limit, best)
    key = mix(
        mix(tl.load(seeds + row).to(tl.uint64, bitcast=True))
        + tl.load(positions + row).to(tl.uint64, bitcast=True)
    )
    drawn = find_drawn(
        logits, limit, key, inverse, highest_score, floor, VOCAB_SIZE, BLOCK, TOKEN_BITS
    )
    tl.store(tokens + row, drawn)


@triton.jit
def load_block(
    logits: tl.tensor, first: tl.tensor, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return tokens and their logits; NaN and what is beyond the vocabulary are minus infinity."""
    token = first + tl.arange(0, BLOCK)
    x = tl.load(logits + token, mask=token < VOCAB_SIZE, other=MINUS_INFINITY)
    return token, tl.where(x == x, x, MINUS_INFINITY)


@triton.jit
def find_likeliest(
    logits: tl.tensor, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the highest logit and the first token that has it."""
    highest = tl.full([], MINUS_INFINITY, tl.float32)
    likeliest = tl.zeros([], tl.int32)
    for first in range(0, VOCAB_SIZE, BLOCK):
        token, x = load_block(logits, first, VOCAB_SIZE, BLOCK)
        of_block = tl.max(x, 0)
        if of_block > highest:
            highest = of_block
            likeliest = tl.min(tl.where(x == of_block, token, VOCAB_SIZE), 0)
    return highest, likeliest


@triton.jit
def rank_of(
    x: tl.tensor, token: tl.tensor, VOCAB_SIZE: tl.constexpr, TOKEN_BITS: tl.constexpr
) -> tl.tensor:
    """Return a number that is larger the better a token is: by logit, then the lower token."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)  # -0 equals 0
    order = tl.where(bits >= SIGN, ~bits, bits | SIGN)
    return (order.to(tl.uint64) << TOKEN_BITS) | (VOCAB_SIZE - 1 - token).to(tl.uint64)


@triton.jit
def weigh(
    logits: tl.tensor,
    limit: tl.tensor,
    inverse: tl.tensor,
    highest_score: tl.tensor,
    floor: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
    BY_SOFTMAX: tl.constexpr,
) -> tl.tensor:
    """Return the softmax's weight of all tokens from a limit on, the likeliest's being 1; or count
    them."""
    weight = tl.zeros([], tl.float64)
    for first in range(0, VOCAB_SIZE, BLOCK):
        token, x = load_block(logits, first, VOCAB_SIZE, BLOCK)
        is_in = (token < VOCAB_SIZE) & (rank_of(x, token, VOCAB_SIZE, TOKEN_BITS) >= limit)
        if BY_SOFTMAX:
            below = x.to(tl.float64) * inverse - highest_score
            weight += tl.sum(tl.where(is_in & (below >= floor), tl.exp(below), 0.0), 0)
        else:
            weight += tl.sum(is_in.to(tl.int32), 0).to(tl.float64)
    return weight


@triton.jit
def find_limit(
    logits: tl.tensor,
    lowest: tl.tensor,
    target: tl.tensor,
    inverse: tl.tensor,
    highest_score: tl.tensor,
    floor: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
    BY_SOFTMAX: tl.constexpr,
) -> tl.tensor:
    """Return the highest limit from which on tokens weigh the target, no lower than `lowest`."""
    limit = tl.zeros([], tl.uint64)
    for place in range(0, ORDER_BITS + TOKEN_BITS):
        bit = (tl.zeros([], tl.uint64) + 1) << (ORDER_BITS + TOKEN_BITS - 1 - place)
        trial = limit | bit
        weight = weigh(
            logits,
            tl.maximum(trial, lowest),
            inverse,
            highest_score,
            floor,
            VOCAB_SIZE,
            BLOCK,
            TOKEN_BITS,
            BY_SOFTMAX,
        )
        limit = tl.where(weight >= target, trial, limit)
    return tl.maximum(limit, lowest)


@triton.jit
def find_drawn(
    logits: tl.tensor,
    limit: tl.tensor,
    key: tl.tensor,
    inverse: tl.tensor,
    highest_score: tl.tensor,
    floor: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> tl.tensor:
    """Return the token whose score and noise add up to most, the lower one among equals."""
    best = tl.full([], MINUS_INFINITY, tl.float64)
    drawn = tl.zeros([], tl.int32)
    for first in range(0, VOCAB_SIZE, BLOCK):
        token, x = load_block(logits, first, VOCAB_SIZE, BLOCK)
        score = x.to(tl.float64) * inverse
        is_in = (token < VOCAB_SIZE) & (rank_of(x, token, VOCAB_SIZE, TOKEN_BITS) >= limit)
        is_in = is_in & (score - highest_score >= floor)
        bits = mix(key + token.to(tl.uint64)) >> 12
        uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52
        value = tl.where(is_in, score - tl.log(-tl.log(uniform)), MINUS_INFINITY)
        of_block = tl.max(value, 0)
        if of_block > best:
            best = of_block
            drawn = tl.min(tl.where(value == of_block, token, VOCAB_SIZE), 0)
    return drawn


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
        if draws.temperatures[row] <= 0 or not highest.isfinite():
            tokens[row] = likeliest
            continue
        scores = scores * (1 / draws.temperatures[row].double())
        kept = candidates(scores, draws, row)
        key = mixed(mixed(draws.seeds[row]) + draws.positions[row])
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
