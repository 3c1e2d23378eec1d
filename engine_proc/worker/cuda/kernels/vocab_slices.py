"""Slices of a vocabulary: several programs share a row of logits, and each has a slice.

Slices depend on the vocabulary alone, so a row has the same bits in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, next_power_of_2
from headrace.engine_proc.worker.cuda.kernels.top_k_top_p import MINUS_INFINITY, load_block

BLOCK = 2048  # tokens that a program loads at once
NUM_WARPS = 16
MAX_SLICES = tl.constexpr(16)  # of a row


def block_of(vocab_size: int) -> int:
    """Return how many tokens a program loads at once."""
    return min(BLOCK, next_power_of_2(vocab_size))


def slice_of(vocab_size: int) -> int:
    """Return how many tokens a slice has: whole blocks."""
    block = block_of(vocab_size)
    return cdiv(cdiv(vocab_size, block), int(MAX_SLICES)) * block


def find_likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest logit of each slice, and the first token that has it, [rows, slices].

    Args:
        logits: [rows, vocab_size], fp32, rows may lie apart.
    """
    num_rows, vocab_size = logits.shape
    slice_size = slice_of(vocab_size)
    num_slices = cdiv(vocab_size, slice_size)
    highest = logits.new_empty(num_rows, num_slices)
    tokens = logits.new_empty(num_rows, num_slices, dtype=torch.int32)
    likeliest_kernel[(num_rows, num_slices)](
        highest,
        tokens,
        logits,
        logits.stride(0),
        vocab_size,
        slice_size,
        BLOCK=block_of(vocab_size),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return highest, tokens


@triton.jit
def likeliest_kernel(
    highest: tl.tensor,
    tokens: tl.tensor,
    logits: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    slice_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride
    start = index * slice_size
    best = tl.full([BLOCK], MINUS_INFINITY, tl.float32)
    at = tl.full([BLOCK], start, tl.int32)
    for first in tl.range(start, tl.minimum(start + slice_size, vocab_size), BLOCK, num_stages=3):
        token, x = load_block(logits, first, vocab_size, BLOCK)
        at = tl.where(x > best, token, at)
        best = tl.maximum(x, best)
    of_slice = tl.max(best, 0)
    place = row * tl.num_programs(1) + index
    tl.store(highest + place, of_slice)
    tl.store(tokens + place, tl.min(tl.where(best == of_slice, at, vocab_size), 0))


@triton.jit
def likeliest_of(
    highest: tl.tensor, tokens: tl.tensor, row: tl.tensor, NUM_SLICES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the highest logit of a row, and the first token that has it."""
    of_slices = load_slices(highest, row, NUM_SLICES, MINUS_INFINITY)
    best = tl.max(of_slices, 0)
    own = load_slices(tokens, row, NUM_SLICES, 0)
    return best, first_of(own, of_slices == best, NUM_SLICES)


@triton.jit
def load_slices(
    numbers: tl.tensor, row: tl.tensor, NUM_SLICES: tl.constexpr, OTHER: tl.constexpr
) -> tl.tensor:
    """Return a number of each slice of a row, [MAX_SLICES]. L1 caches may not have them."""
    index = tl.arange(0, MAX_SLICES)
    place = numbers + row * NUM_SLICES + index
    return tl.load(place, mask=index < NUM_SLICES, other=OTHER, cache_modifier=".cg")


@triton.jit
def first_of(tokens: tl.tensor, is_in: tl.tensor, NUM_SLICES: tl.constexpr) -> tl.tensor:
    """Return the lowest of some slices' tokens."""
    is_slice = tl.arange(0, MAX_SLICES) < NUM_SLICES
    return tl.min(tl.where(is_in & is_slice, tokens, 0x7FFFFFFF), 0)
