"""The threshold of top-k and top-p in a row of logits, found without a sort.

Tokens are ordered by numbers that no two have in common, so nothing is sorted. A pass over the row
weighs the tokens above several limits at once. It leaves a bracket between two of them, which the
next pass divides. Once a program can hold the bracket's tokens in its registers, they are written
apart, and the limit is found among them bit by bit. That takes three or four passes in all. Here
one program has a row; in `row_limits.py` several share one.
"""

import triton
import triton.language as tl

MINUS_INFINITY = tl.constexpr(float("-inf"))
SIGN = tl.constexpr(0x80000000)
PARTS = tl.constexpr(8)  # of a bracket, in a pass
FEW = tl.constexpr(64)  # tokens that are compared each with each
DEEPEST = tl.constexpr(32.0)  # below the highest score; then half of it, and so on


@triton.jit
def load_block(
    logits: tl.tensor, first: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return tokens and their logits; NaN and positions beyond the vocabulary are minus
    infinity."""
    token = first + tl.arange(0, BLOCK)
    x = tl.load(logits + token, mask=token < vocab_size, other=MINUS_INFINITY)
    return token, tl.where(x == x, x, MINUS_INFINITY)


@triton.jit
def rank_of(
    x: tl.tensor, token: tl.tensor, vocab_size: tl.tensor, TOKEN_BITS: tl.constexpr
) -> tl.tensor:
    """Return a number that is larger the better a token is: by logit, then the lower token."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)  # -0 equals 0
    order = tl.where(bits >= SIGN, ~bits, bits | SIGN)
    return (order.to(tl.uint64) << TOKEN_BITS) | (vocab_size - 1 - token).to(tl.uint64)


@triton.jit
def logit_of(rank: tl.tensor, TOKEN_BITS: tl.constexpr) -> tl.tensor:
    """Return the logit of a token that ranks so."""
    order = (rank >> TOKEN_BITS).to(tl.uint32)
    return tl.where(order >= SIGN, order ^ SIGN, ~order).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(
    x: tl.tensor, inverse: tl.tensor, highest_score: tl.tensor, floor: tl.tensor
) -> tl.tensor:
    """Return the softmax's weights of logits, the likeliest's being 1."""
    below = x.to(tl.float64) * inverse - highest_score
    return tl.where(below >= floor, tl.exp(below), 0.0)


@triton.jit
def find_limit(
    logits: tl.tensor,
    bracket: tl.tensor,
    highest: tl.tensor,
    lowest: tl.tensor,
    target: tl.tensor,
    inverse: tl.tensor,
    floor: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
    BY_SOFTMAX: tl.constexpr,
) -> tl.tensor:
    """Return the highest limit from which on tokens weigh enough, no lower than `lowest`.

    Args:
        bracket: room for BLOCK numbers, uint64.
        target: how many tokens are enough; or, if BY_SOFTMAX, which part of the weight of all that
            are no lower than `lowest`.
    """
    part = tl.arange(0, PARTS)
    depths = DEEPEST * tl.exp2(1.0 - part.to(tl.float64)) / inverse
    none, last = tl.zeros([], tl.int32), tl.full([], vocab_size - 1, tl.int32)
    near = (highest.to(tl.float64) - depths).to(tl.float32)
    limits = rank_of(near, last, vocab_size, TOKEN_BITS)
    limits = tl.maximum(tl.where(part == 0, 0, limits), lowest)
    highest_score = highest.to(tl.float64) * inverse
    weights, counts = weigh(
        logits, limits, inverse, highest_score, floor, vocab_size, BLOCK, TOKEN_BITS, BY_SOFTMAX
    )
    if BY_SOFTMAX:
        target *= pick(weights, 0)
    low, high = lowest, rank_of(highest, none, vocab_size, TOKEN_BITS) + 1
    above, num_above = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    low, high, above, num_above, num = narrow(
        limits, weights, counts, target, high, above, num_above
    )
    while num > BLOCK:
        step = (high - low + PARTS - 1) // PARTS
        limits = tl.minimum(low + part.to(tl.uint64) * step, high)
        weights, counts = weigh(
            logits, limits, inverse, highest_score, floor, vocab_size, BLOCK, TOKEN_BITS, BY_SOFTMAX
        )
        low, high, above, num_above, num = narrow(
            limits, weights, counts, target, high, above, num_above
        )
    num = write_bracket(
        logits, bracket, 0, vocab_size, none, low, high, vocab_size, BLOCK, TOKEN_BITS
    )
    place = tl.arange(0, BLOCK)
    ranks = tl.load(bracket + place, mask=place < num, other=0)
    own = (ranks > 0).to(tl.float64)
    if BY_SOFTMAX:
        own = weight_of(logit_of(ranks, TOKEN_BITS), inverse, highest_score, floor)
    limit = limit_among(ranks, own, low, high, above, target, BY_SOFTMAX == 0)
    tl.debug_barrier()  # the bracket may be written again
    return limit


@triton.jit
def limit_among(
    ranks: tl.tensor,
    own: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    above: tl.tensor,
    target: tl.tensor,
    is_count: tl.tensor,
) -> tl.tensor:
    """Return the highest limit from `low` to below `high` from which on ranks weigh enough, or
    `low`.

    Args:
        own: what each weighs, fp64; 1 if `is_count`, and then a limit with as many will do.
        above: what others weigh, that are no lower than `high`.
    """
    reached = tl.full([], -1.0, tl.float64)
    while (high - low > 1) & ((is_count == 0) | (reached != target)):
        middle = low + (high - low) // 2
        weight = above + tl.sum(tl.where(ranks >= middle, own, 0.0), 0)
        is_enough = weight >= target
        reached = tl.where(is_enough, weight, reached)
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
    return low


@triton.jit
def find_few(
    logits: tl.tensor,
    bracket: tl.tensor,
    highest: tl.tensor,
    lowest: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> tl.tensor:
    """Return the ranks of all tokens that are no lower than `lowest`, [FEW]; 0 is none.

    Args:
        bracket: room for FEW numbers, uint64.
        lowest: no more than FEW tokens are as high.
    """
    none = tl.zeros([], tl.int32)
    end = rank_of(highest, none, vocab_size, TOKEN_BITS) + 1
    num = write_bracket(
        logits, bracket, 0, vocab_size, none, lowest, end, vocab_size, BLOCK, TOKEN_BITS
    )
    place = tl.arange(0, FEW)
    return tl.load(bracket + place, mask=place < num, other=0)


@triton.jit
def weigh(
    logits: tl.tensor,
    limits: tl.tensor,
    inverse: tl.tensor,
    highest_score: tl.tensor,
    floor: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
    BY_SOFTMAX: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the weights of all tokens from each limit on, and how many they are."""
    weights = tl.zeros([PARTS], tl.float64)
    counts = tl.zeros([PARTS], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        token, x = load_block(logits, first, vocab_size, BLOCK)
        rank = rank_of(x, token, vocab_size, TOKEN_BITS)
        is_in = (token < vocab_size)[:, None] & (rank[:, None] >= limits[None, :])
        of_block = tl.sum(is_in.to(tl.int32), 0)
        counts += of_block
        if not BY_SOFTMAX:
            weights += of_block.to(tl.float64)
        elif tl.max(of_block, 0) > 0:
            own = weight_of(x, inverse, highest_score, floor)
            weights += tl.sum(tl.where(is_in, own[:, None], 0.0), 0)
    return weights, counts


@triton.jit
def narrow(
    limits: tl.tensor,
    weights: tl.tensor,
    counts: tl.tensor,
    target: tl.tensor,
    high: tl.tensor,
    above: tl.tensor,
    num_above: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the bracket's part where the target is reached: its ends, the weight and number of
    tokens above it, and how many are in it."""
    place = tl.maximum(tl.sum((weights >= target).to(tl.int32), 0), 1) - 1
    if place + 1 < PARTS:
        high = pick(limits, place + 1)
        above = pick(weights, place + 1)
        num_above = pick(counts, place + 1)
    return pick(limits, place), high, above, num_above, pick(counts, place) - num_above


@triton.jit
def pick(numbers: tl.tensor, place: tl.tensor) -> tl.tensor:
    """Return one of some numbers."""
    return tl.sum(tl.where(tl.arange(0, numbers.shape[0]) == place, numbers, 0), 0)


@triton.jit
def write_bracket(
    logits: tl.tensor,
    bracket: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    num: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> tl.tensor:
    """Write the ranks from `low` to below `high`, of tokens from `start` to before `end`, behind
    `num` others; return how many there are then."""
    for first in range(start, end, BLOCK):
        token, x = load_block(logits, first, vocab_size, BLOCK)
        rank = rank_of(x, token, vocab_size, TOKEN_BITS)
        is_in = (token < vocab_size) & (rank >= low) & (rank < high)
        of_block = tl.sum(is_in.to(tl.int32), 0)
        if of_block > 0:
            place = num + tl.cumsum(is_in.to(tl.int32), 0) - 1
            tl.store(bracket + place, rank, mask=is_in)
            num += of_block
    tl.debug_barrier()  # others of the program have written what we read
    return num
