"""Numbers that are added to the logits of some tokens of a row; minus infinity bans them."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
MINUS_INFINITY = tl.constexpr(float("-inf"))


def add_biases(
    logits: Tensor, starts: Tensor, counts: Tensor, bias_tokens: Tensor, biases: Tensor
) -> None:
    """Add each row's biases, in place. Tokens beyond the vocabulary are passed over.

    Args:
        logits: [rows, vocab_size], fp32, rows may lie apart.
        starts, counts: [rows], int32: which of the biases are a row's.
        bias_tokens: int32; those of a row that are not banned differ from each other.
        biases: fp32
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    if num_rows:
        bias_kernel[(num_rows,)](
            logits,
            starts,
            counts,
            bias_tokens,
            biases,
            logits.stride(0),
            starts.stride(0),
            VOCAB_SIZE=vocab_size,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )


@triton.jit
def bias_kernel(
    logits: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    bias_tokens: tl.tensor,
    biases: tl.tensor,
    stride: tl.tensor,
    column_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + row * column_stride)
    end = start + tl.load(counts + row * column_stride)
    logits += row * stride
    for bans in tl.static_range(2):  # they come last: a token may be biased and banned
        for first in range(start, end, BLOCK):
            at = first + tl.arange(0, BLOCK)
            token = tl.load(bias_tokens + at, mask=at < end, other=-1)
            bias = tl.load(biases + at, mask=at < end, other=0.0)
            is_ban = bias == MINUS_INFINITY
            is_token = (token >= 0) & (token < VOCAB_SIZE)
            if bans:
                nothing = tl.full([BLOCK], MINUS_INFINITY, tl.float32)
                tl.store(logits + token, nothing, mask=is_token & is_ban)
            else:
                is_biased = is_token & (is_ban == 0)
                x = tl.load(logits + token, mask=is_biased, other=0.0)
                tl.store(logits + token, x + bias, mask=is_biased)
        tl.debug_barrier()


def reference(
    logits: Tensor, starts: Tensor, counts: Tensor, bias_tokens: Tensor, biases: Tensor
) -> None:
    """Do as `add_biases`, in plain torch."""
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        own = slice(start, start + count)
        for token, bias in zip(bias_tokens[own].tolist(), biases[own].tolist(), strict=True):
            if 0 <= token < logits.shape[1]:
                logits[row, token] += bias
