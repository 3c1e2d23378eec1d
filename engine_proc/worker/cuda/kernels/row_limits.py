"""The limit of top-k and top-p in each row of logits, found by programs that share the row.

A pass weighs the tokens of each slice above several limits. The sums of all slices, added in their
order, leave a bracket between two of these limits, which the next pass divides. Each pass is a
launch, and each program works out the bracket for itself. The last launch has slices write the
bracket's tokens apart. There the last program to come finds the limit.

Where a program can hold all tokens above the bracket, too, these are left beside the limit. Then
top-p of what top-k leaves takes no pass, and the draw looks at nothing else. A bracket that is
still too large, as one of thousands of equal logits, is left to one program.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.split_semaphore import comes_last
from headrace.engine_proc.worker.cuda.kernels.top_k_top_p import (
    DEEPEST,
    MINUS_INFINITY,
    find_limit,
    limit_among,
    load_block,
    logit_of,
    pick,
    rank_of,
    weight_of,
    write_bracket,
)
from headrace.engine_proc.worker.cuda.kernels.vocab_slices import (
    MAX_SLICES,
    NUM_WARPS,
    block_of,
    likeliest_of,
    slice_of,
)

NUM_PASSES = tl.constexpr(3)  # at most; a row whose bracket is small enough takes no more
SHARES = tl.constexpr(16)  # of a bracket, in a pass
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32
LANES = 256  # tokens that a program weighs at once: one for each thread
WEIGHING_WARPS = 8


@dataclass(frozen=True)
class RowLimits:
    """The limit of each row that has top-k or top-p; of others nothing is defined.

    Ranks and limits are `rank_of` a token, the bits of a u64.
    """

    limits: Tensor  # [rows], int64
    num_left: Tensor  # [rows], int32: how many ranks are left apart; 0 if they are too many
    left: Tensor  # [rows, block], int64: these, and all others are below the limit


def room_for_limits(logits: Tensor) -> RowLimits:
    """Return room for the limits of some rows, [rows, vocab_size]."""
    num_rows, vocab_size = logits.shape
    return RowLimits(
        logits.new_empty(num_rows, dtype=torch.int64),
        logits.new_empty(num_rows, dtype=torch.int32),
        logits.new_empty(num_rows, block_of(vocab_size), dtype=torch.int64),
    )


def find_limits(
    logits: Tensor,
    highest: Tensor,
    likeliest: Tensor,
    filters: tuple[Tensor, Tensor, Tensor, Tensor],
    turns: Tensor,
) -> RowLimits:
    """Return the limits of rows.

    Args:
        logits: [rows, vocab_size], fp32, rows may lie apart.
        highest, likeliest: of `find_likeliest`.
        filters: temperature, top-k, top-p and min-p of each row, equally apart; see `Draws`.
        turns: of `new_turns`, one for each row at least.
    """
    num_rows, vocab_size = logits.shape
    num_slices, block = highest.shape[1], block_of(vocab_size)
    found = room_for_limits(logits)
    shape = (int(NUM_PASSES), num_rows, num_slices, int(SHARES))
    sums = logits.new_empty(shape, dtype=torch.float64)
    counts = logits.new_empty(shape, dtype=torch.int32)
    stride, apart = logits.stride(0), filters[0].stride(0)
    sizes = (stride, apart, vocab_size, slice_of(vocab_size))
    options = {
        "BLOCK": block,
        "TOKEN_BITS": max(1, (vocab_size - 1).bit_length()),
        "enable_fp_fusion": False,
    }
    grid = (num_rows, num_slices)
    for num_done in range(int(NUM_PASSES)):
        weigh_kernel[grid](
            sums,
            counts,
            logits,
            highest,
            likeliest,
            *filters,
            *sizes,
            num_done,
            LANES=min(LANES, block),
            num_warps=WEIGHING_WARPS,
            **options,
        )
    limit_kernel[grid](
        found.limits,
        found.num_left,
        found.left,
        turns,
        sums,
        counts,
        logits,
        highest,
        likeliest,
        *filters,
        *sizes,
        num_warps=NUM_WARPS,
        **options,
    )
    return found


@triton.jit(do_not_specialize=["slice_size", "num_done"])
def weigh_kernel(
    sums: tl.tensor,
    counts: tl.tensor,
    logits: tl.tensor,
    highest_of: tl.tensor,
    likeliest_in: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    stride: tl.tensor,
    apart: tl.tensor,
    vocab_size: tl.tensor,
    slice_size: tl.tensor,
    num_done: tl.tensor,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> None:
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_slices = tl.num_programs(1)
    logits += row * stride
    highest, _ = likeliest_of(highest_of, likeliest_in, row, num_slices)
    is_greedy, k, p, inverse, floor = filters_of(
        temperatures, top_ks, top_ps, min_ps, row * apart, highest, vocab_size
    )
    if is_greedy | ((k == 0) & (p >= 1)):
        return
    base, _ = ends_of(highest, vocab_size, TOKEN_BITS)
    low, high, _, from_low, from_high, _ = bracket_of(
        sums, counts, row, num_done, highest, k, p, inverse, vocab_size, BLOCK, TOKEN_BITS
    )
    if (num_done > 0) & (is_large(from_low, from_high, k, BLOCK) == 0):
        return
    limits = limits_between(
        low, high, base, highest, k, inverse, num_done == 0, vocab_size, TOKEN_BITS
    )
    highest_score = highest.to(tl.float64) * inverse
    weights = tl.zeros([LANES, SHARES], tl.float64)
    numbers = tl.zeros([LANES, SHARES], tl.int32)
    start = index * slice_size
    for first in tl.range(start, tl.minimum(start + slice_size, vocab_size), LANES, num_stages=3):
        token, x = load_block(logits, first, vocab_size, LANES)
        rank = rank_of(x, token, vocab_size, TOKEN_BITS)
        own = tl.full([LANES], 1.0, tl.float64)
        if k == 0:
            own = weight_of(x, inverse, highest_score, floor)
        is_in = (token < vocab_size)[:, None] & (rank[:, None] >= limits[None, :])
        weights += tl.where(is_in, own[:, None], 0.0)
        numbers += is_in.to(tl.int32)
    share = tl.arange(0, SHARES)
    place = ((num_done * tl.num_programs(0) + row) * num_slices + index) * SHARES + share
    tl.store(sums + place, tl.sum(weights, 0))
    tl.store(counts + place, tl.sum(numbers, 0))


@triton.jit(do_not_specialize=["slice_size"])
def limit_kernel(
    limits: tl.tensor,
    num_left: tl.tensor,
    left: tl.tensor,
    turns: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    logits: tl.tensor,
    highest_of: tl.tensor,
    likeliest_in: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    stride: tl.tensor,
    apart: tl.tensor,
    vocab_size: tl.tensor,
    slice_size: tl.tensor,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> None:
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_slices = tl.num_programs(1)
    logits += row * stride
    highest, likeliest = likeliest_of(highest_of, likeliest_in, row, num_slices)
    is_greedy, k, p, inverse, floor = filters_of(
        temperatures, top_ks, top_ps, min_ps, row * apart, highest, vocab_size
    )
    if is_greedy | ((k == 0) & (p >= 1)):
        return
    base, end = ends_of(highest, vocab_size, TOKEN_BITS)
    low, high, above, from_low, from_high, target = bracket_of(
        sums, counts, row, NUM_PASSES, highest, k, p, inverse, vocab_size, BLOCK, TOKEN_BITS
    )
    num = tl.sum(from_low, 0)
    is_whole = num <= BLOCK  # with all that is above the bracket
    num = tl.where(is_whole, num, num - tl.sum(from_high, 0))
    fits = num <= BLOCK
    bracket = left.to(tl.pointer_type(tl.uint64)) + row * BLOCK
    is_last = index == 0
    if fits:
        own = tl.where(is_whole, from_low, from_low - from_high)
        before = tl.sum(tl.where(tl.arange(0, MAX_SLICES) < index, own, 0), 0)
        first = index * slice_size
        last = tl.minimum(first + slice_size, vocab_size)
        top = tl.where(is_whole, end, high)
        write_bracket(logits, bracket, first, last, before, low, top, vocab_size, BLOCK, TOKEN_BITS)
        is_last = comes_last(turns, row, num_slices)
    if is_last == 0:
        return
    limit = base
    highest_score = highest.to(tl.float64) * inverse
    if fits:
        place = tl.arange(0, BLOCK)
        ranks = tl.load(bracket + place, mask=place < num, other=0, cache_modifier=".cg")
        weights = weight_of(logit_of(ranks, TOKEN_BITS), inverse, highest_score, floor)
        above = tl.where(is_whole, 0.0, above)
        own_p = tl.where(is_whole, p, 1.0)
        limit = limit_of_left(ranks, weights, low, high, end, above, target, k, own_p)
    if (fits == 0) | ((is_whole == 0) & (k > 0) & (p < 1)):
        k = tl.where(fits, 0, k)
        limit = limit_alone(
            logits,
            bracket,
            highest,
            limit,
            target,
            k,
            p,
            inverse,
            floor,
            vocab_size,
            BLOCK,
            TOKEN_BITS,
        )
    limit = tl.minimum(limit, rank_of(highest, likeliest, vocab_size, TOKEN_BITS))
    tl.store(limits + row, limit.to(tl.int64, bitcast=True))
    tl.store(num_left + row, tl.where(is_whole, num, 0))


@triton.jit
def limit_of_left(
    ranks: tl.tensor,
    weights: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    end: tl.tensor,
    above: tl.tensor,
    target: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
) -> tl.tensor:
    """Return the limit, from `low` to below `high`, among ranks that a program holds; 0 is none.

    Args:
        weights: of the softmax.
        end: above all ranks.
        above, target: as `bracket_of` returns them; 0 if ranks above `high` are held, too.
        p: of what top-k leaves; 1 is all.
    """
    own = tl.where(k > 0, (ranks > 0).to(tl.float64), weights)
    limit = limit_among(ranks, own, low, high, above, target, k > 0)
    if (k > 0) & (p < 1):
        weights = tl.where(ranks >= limit, weights, 0.0)
        target = p * tl.sum(weights, 0)
        limit = limit_among(ranks, weights, limit, end, above, target, k == 0)
    return limit


@triton.jit
def limit_alone(
    logits: tl.tensor,
    bracket: tl.tensor,
    highest: tl.tensor,
    lowest: tl.tensor,
    target: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    inverse: tl.tensor,
    floor: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> tl.tensor:
    """Return the limit that this program finds in the whole row, no lower than `lowest`.

    Args:
        target: how many tokens are enough, if `k` is not 0.
    """
    if k > 0:
        lowest = find_limit(
            logits,
            bracket,
            highest,
            lowest,
            target,
            inverse,
            floor,
            vocab_size,
            BLOCK,
            TOKEN_BITS,
            False,
        )
    if p < 1:
        lowest = find_limit(
            logits, bracket, highest, lowest, p, inverse, floor, vocab_size, BLOCK, TOKEN_BITS, True
        )
    return lowest


@triton.jit
def filters_of(
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    place: tl.tensor,
    highest: tl.tensor,
    vocab_size: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return whether a row takes its likeliest token, its top-k, top-p, inverse temperature and
    floor: how far below the highest a score may be. A top-k of 0 is all."""
    temperature, min_p = tl.load(temperatures + place), tl.load(min_ps + place).to(tl.float64)
    k, p = tl.load(top_ks + place), tl.load(top_ps + place).to(tl.float64)
    is_greedy = (temperature <= 0) | (tl.abs(highest) == -MINUS_INFINITY)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0).to(tl.float64)
    log_min_p = tl.minimum(tl.log(tl.where(min_p > 0, min_p, 1.0)), 0.0)
    floor = tl.where(min_p > 0, log_min_p, MINUS_INFINITY)
    return is_greedy, tl.where((k > 0) & (k < vocab_size), k, 0), p, inverse, floor


@triton.jit
def ends_of(
    highest: tl.tensor, vocab_size: tl.tensor, TOKEN_BITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return what all ranks are between: those of tokens that are possible at all."""
    none = tl.zeros([], tl.int32)
    impossible = tl.full([], MINUS_INFINITY, tl.float32)
    lowest = rank_of(impossible, none, vocab_size, TOKEN_BITS) + 1
    return lowest, rank_of(highest, none, vocab_size, TOKEN_BITS) + 1


@triton.jit
def bracket_of(
    sums: tl.tensor,
    counts: tl.tensor,
    row: tl.tensor,
    num_done: tl.tensor,
    highest: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    inverse: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the bracket that passes leave, and the target.

    Of the bracket these are its ends, and what the tokens above it weigh. There is also how many
    tokens each slice has from either end on, [MAX_SLICES]. With top-k each token weighs 1.
    """
    num_rows, num_slices = tl.num_programs(0), tl.num_programs(1)
    share, slices = tl.arange(0, SHARES), tl.arange(0, MAX_SLICES)
    base, end = ends_of(highest, vocab_size, TOKEN_BITS)
    low, high = base, end
    above, target = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    from_low, from_high = tl.zeros([MAX_SLICES], tl.int32), tl.zeros([MAX_SLICES], tl.int32)
    for done in range(num_done):
        is_first = done == 0
        if is_first | is_large(from_low, from_high, k, BLOCK):
            limits = limits_between(
                low, high, base, highest, k, inverse, is_first, vocab_size, TOKEN_BITS
            )
            place = ((done * num_rows + row) * num_slices + slices[:, None]) * SHARES
            place += share[None, :]
            is_slice = (slices < num_slices)[:, None] & (share >= 0)[None, :]
            numbers = tl.load(counts + place, mask=is_slice, other=0)
            weights = tl.sum(tl.load(sums + place, mask=is_slice, other=0.0), 0)
            if is_first:
                whole = pick(weights, 0)
                target = tl.where(k > 0, tl.minimum(k.to(tl.float64), whole), p * whole)
            at = tl.maximum(tl.sum((weights >= target).to(tl.int32), 0), 1) - 1
            if at + 1 < SHARES:
                high, above = pick(limits, at + 1), pick(weights, at + 1)
                from_high = tl.sum(tl.where(share[None, :] == at + 1, numbers, 0), 1)
            low = pick(limits, at)
            from_low = tl.sum(tl.where(share[None, :] == at, numbers, 0), 1)
    return low, high, above, from_low, from_high, target


@triton.jit
def is_large(
    from_low: tl.tensor, from_high: tl.tensor, k: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Whether a program cannot hold a bracket's tokens; where top-k leaves no more than it can
    hold, those above it, too."""
    num = tl.sum(from_low, 0)
    is_few = (k > 0) & (k <= BLOCK)
    return tl.where(is_few, num, num - tl.sum(from_high, 0)) > BLOCK


@triton.jit
def limits_between(
    low: tl.tensor,
    high: tl.tensor,
    base: tl.tensor,
    highest: tl.tensor,
    k: tl.tensor,
    inverse: tl.tensor,
    is_first: tl.tensor,
    vocab_size: tl.tensor,
    TOKEN_BITS: tl.constexpr,
) -> tl.tensor:
    """Return the limits that divide a bracket, rising from `low` to no more than `high`, [SHARES].

    The first pass divides by depth below the highest: half octaves of scores, or of logits where
    tokens are counted. A bracket below all of these is divided by octaves, any other by logits. One
    of few different logits is divided by ranks.
    """
    share, above = tl.arange(0, SHARES), highest.to(tl.float64)
    depth = tl.where(is_first, 0.5 * (1 - share), SHARES - share).to(tl.float64)
    depth = DEEPEST * tl.exp2(depth) * tl.where(k > 0, 1.0, 1.0 / inverse)
    by_depth = is_first | (low == base)
    bottom = tl.where(by_depth, above, logit_of(low, TOKEN_BITS).to(tl.float64))
    top = tl.minimum(logit_of(high, TOKEN_BITS).to(tl.float64), above)
    part = (top - bottom) * share.to(tl.float64) / SHARES
    near = tl.maximum(tl.where(by_depth, above - depth, bottom + part), LOWEST).to(tl.float32)
    limits = rank_of(near, tl.full([], vocab_size - 1, tl.int32), vocab_size, TOKEN_BITS)
    has_few = ((high - low) >> TOKEN_BITS) < SHARES
    step = (high - low + SHARES - 1) // SHARES
    limits = tl.where(by_depth | (has_few == 0), limits, low + share.to(tl.uint64) * step)
    return tl.minimum(tl.maximum(tl.where(share == 0, low, limits), low), high)
