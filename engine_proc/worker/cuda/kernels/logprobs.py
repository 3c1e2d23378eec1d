"""Log probabilities of tokens, and the likeliest in their places, as in the C++ sampler."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv
from headrace.engine_proc.worker.cuda.kernels.top_k_top_p import (
    FEW,
    MINUS_INFINITY,
    find_few,
    find_limit,
    load_block,
    weight_of,
)
from headrace.engine_proc.worker.cuda.kernels.vocab_slices import (
    NUM_WARPS,
    block_of,
    find_likeliest,
    likeliest_of,
    slice_of,
)

HEAD_NUMBERS = 2  # of a report: logprob and rank; then pairs of token and logprob


def report(logits: Tensor, tokens: Tensor, num_tops: Tensor, most: int) -> Tensor:
    """Return the reported values of each row's token, [rows, 2 + 2 * most], int32 or the bits of
    fp32.

    Args:
        logits: [rows, vocab_size], fp32, the model's own.
        tokens: [rows], int32
        num_tops: [rows], int32: likeliest tokens that are reported; beyond them nothing is written.
        most: the largest of these.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert most <= int(FEW)
    block, slice_size = block_of(vocab_size), slice_of(vocab_size)
    num_slices, num_blocks = cdiv(vocab_size, slice_size), cdiv(vocab_size, block)
    out = tokens.new_empty(num_rows, HEAD_NUMBERS + 2 * most)
    if num_rows:
        highest, likeliest = find_likeliest(logits)
        totals = logits.new_empty(num_rows, num_blocks, dtype=torch.float64)
        counts = tokens.new_empty(num_rows, num_blocks)
        totals_kernel[(num_rows, num_slices)](
            totals,
            counts,
            logits,
            highest,
            likeliest,
            tokens,
            logits.stride(0),
            vocab_size,
            slice_size,
            num_blocks,
            NUM_SLICES=num_slices,
            BLOCK=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
        report_kernel[(num_rows,)](
            out,
            logits,
            highest,
            likeliest,
            totals,
            counts,
            logits.new_empty(num_rows, block, dtype=torch.int64),
            logits.stride(0),
            out.stride(0),
            tokens,
            num_tops,
            VOCAB_SIZE=vocab_size,
            BLOCK=block,
            SLICE=slice_size,
            TOKEN_BITS=max(1, (vocab_size - 1).bit_length()),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["num_blocks"])
def totals_kernel(
    totals: tl.tensor,
    counts: tl.tensor,
    logits: tl.tensor,
    highest_of: tl.tensor,
    likeliest_in: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    slice_size: tl.tensor,
    num_blocks: tl.tensor,
    NUM_SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride
    highest = base_of(likeliest_of(highest_of, likeliest_in, row, NUM_SLICES)[0])
    own = tl.load(logits + tl.load(tokens + row))
    start = index * slice_size
    place = row * num_blocks + start // BLOCK
    for first in range(start, tl.minimum(start + slice_size, vocab_size), BLOCK):
        x = load_block(logits, first, vocab_size, BLOCK)[1]
        tl.store(totals + place, tl.sum(weight_of(x, 1.0, highest, MINUS_INFINITY), 0))
        tl.store(counts + place, tl.sum((x > own).to(tl.int32), 0))
        place += 1


@triton.jit(do_not_specialize=["out_stride"])
def report_kernel(
    out: tl.tensor,
    logits: tl.tensor,
    highest_of: tl.tensor,
    likeliest_in: tl.tensor,
    totals: tl.tensor,
    counts: tl.tensor,
    brackets: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    tokens: tl.tensor,
    num_tops: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> None:
    NUM_SLICES: tl.constexpr = (VOCAB_SIZE + SLICE - 1) // SLICE
    NUM_BLOCKS: tl.constexpr = (VOCAB_SIZE + BLOCK - 1) // BLOCK
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    out += row * out_stride
    best = likeliest_of(highest_of, likeliest_in, row, NUM_SLICES)[0]
    highest = base_of(best)
    is_finite = highest == best
    own = tl.load(logits + tl.load(tokens + row))
    total, num_above = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for block in range(row * NUM_BLOCKS, row * NUM_BLOCKS + NUM_BLOCKS):
        total += tl.load(totals + block)
        num_above += tl.load(counts + block)
    log_sum = tl.where(is_finite, highest + tl.log(tl.maximum(total, 1e-300)), -MINUS_INFINITY)
    tl.store(out, logprob_bits(own, log_sum))
    tl.store(out + 1, 1 + num_above)
    num = tl.load(num_tops + row)
    if num > 0:
        bracket = brackets.to(tl.pointer_type(tl.uint64)) + row * BLOCK
        ranks = find_tops(logits, bracket, best, num, VOCAB_SIZE, BLOCK, TOKEN_BITS)
        place, lane = tl.sum((ranks[None, :] > ranks[:, None]).to(tl.int32), 1), tl.arange(0, FEW)
        token = VOCAB_SIZE - 1 - (ranks & ((1 << TOKEN_BITS) - 1)).to(tl.int32)
        is_token = (ranks > 0) & (place < num)
        x = tl.load(logits + token, mask=is_token, other=MINUS_INFINITY)
        tl.store(out + 2 + 2 * place, token, mask=is_token)
        tl.store(out + 3 + 2 * place, logprob_bits(x, log_sum), mask=is_token)
        is_none = (lane >= VOCAB_SIZE) & (lane < num)
        nothing = logprob_bits(tl.full([FEW], MINUS_INFINITY, tl.float32), log_sum)
        tl.store(out + 2 + 2 * lane, -1, mask=is_none)
        tl.store(out + 3 + 2 * lane, nothing, mask=is_none)


@triton.jit
def find_tops(
    logits: tl.tensor,
    bracket: tl.tensor,
    highest: tl.tensor,
    num: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
) -> tl.tensor:
    """Return the ranks of the likeliest tokens, [FEW], in no order; 0 is none.

    Args:
        num: of these, no more than FEW; all where there are fewer.
    """
    limit = tl.zeros([], tl.uint64)
    if num < VOCAB_SIZE:
        limit = find_limit(
            logits,
            bracket,
            highest,
            limit,
            num.to(tl.float64),
            1.0,
            MINUS_INFINITY,
            VOCAB_SIZE,
            BLOCK,
            TOKEN_BITS,
            False,
        )
    return find_few(logits, bracket, highest, limit, VOCAB_SIZE, BLOCK, TOKEN_BITS)


@triton.jit
def base_of(best: tl.tensor) -> tl.tensor:
    """Return what a row's weights are relative to: its highest logit, or 0 if that is infinite."""
    is_finite = (best > MINUS_INFINITY) & (best < -MINUS_INFINITY)
    return tl.where(is_finite, best, 0.0).to(tl.float64)


@triton.jit
def logprob_bits(x: tl.tensor, log_sum: tl.tensor) -> tl.tensor:
    """Return the bits of a log probability; NaN is minus infinity."""
    difference = (x.to(tl.float64) - log_sum).to(tl.float32)
    return tl.where(difference == difference, difference, MINUS_INFINITY).to(tl.int32, bitcast=True)


def reference(logits: Tensor, tokens: Tensor, num_tops: Tensor, most: int) -> Tensor:
    """Compute `report` in plain torch, row by row; undefined entries are 0."""
    out = torch.zeros(len(logits), HEAD_NUMBERS + 2 * most, dtype=torch.int32, device=logits.device)
    wide = logits.nan_to_num(nan=float("-inf"), neginf=float("-inf"), posinf=float("inf")).double()
    logprobs = wide.log_softmax(1).nan_to_num(nan=float("-inf"), neginf=float("-inf")).float()
    for row, (token, num_top) in enumerate(zip(tokens.tolist(), num_tops.tolist(), strict=True)):
        order = wide[row].argsort(descending=True, stable=True)[:num_top]
        out[row, :1] = logprobs[row, token].view(torch.int32)
        out[row, 1] = 1 + (wide[row] > wide[row, token]).sum()
        end = HEAD_NUMBERS + 2 * len(order)
        out[row, HEAD_NUMBERS:end:2] = order.int()
        out[row, HEAD_NUMBERS + 1 : end : 2] = logprobs[row, order].view(torch.int32)
    return out
