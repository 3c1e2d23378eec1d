"""Penalties on tokens that a row has: `RowSampler::penalize` of `csrc/sampling/sampler_row.cpp`.

A row's tokens are counted in a table as long as the vocabulary. Only the entries of these tokens
are set to zero, counted and read, so the work is that of the history.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv

BLOCK = 1024
MINUS_INFINITY = tl.constexpr(float("-inf"))


@dataclass(frozen=True)
class Penalties:
    """The penalties of some rows, [rows]."""

    rows: Tensor  # int32 or int64, of the logits
    starts: Tensor  # int32 or int64, where the row's tokens begin in the history,
    num_prompt: Tensor  # int32, how many of them, the first, are the prompt's,
    num_history: Tensor  # int32, and how many there are
    presence: Tensor  # fp32, of tokens generated
    frequency: Tensor  # fp32, the same, times how often
    repetition: Tensor  # fp32, of tokens generated or in the prompt: a factor


def penalize(
    logits: Tensor, penalties: Penalties, history: Tensor, most: int | None = None
) -> None:
    """Penalize tokens in some rows, in place; those beyond the vocabulary are passed over.

    Args:
        logits: [all rows, vocab_size], fp32, rows may lie apart.
        history: int32
        most: the most tokens that one of the rows has; default: all of `history`.
    """
    num_rows, vocab_size = len(penalties.rows), logits.shape[1]
    assert logits.stride(1) == 1
    if num_rows == 0:
        return
    # Twice how often each token was generated, and 1 if it is in the prompt. The rest is undefined.
    counts = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
    grid = num_rows, cdiv(len(history) if most is None else most, BLOCK)
    places = history, penalties.starts, penalties.num_prompt, penalties.num_history
    for is_counted in (False, True):
        count_kernel[grid](
            counts, *places, vocab_size, IS_COUNTED=is_counted, BLOCK=BLOCK, enable_fp_fusion=False
        )
    penalty_kernel[grid](
        logits,
        logits.stride(0),
        counts,
        *places,
        penalties.rows,
        penalties.presence,
        penalties.frequency,
        penalties.repetition,
        vocab_size,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["starts", "num_prompt", "num_history", "vocab_size"])
def count_kernel(
    counts: tl.tensor,
    history: tl.tensor,
    starts: tl.tensor,
    num_prompt: tl.tensor,
    num_history: tl.tensor,
    vocab_size: tl.tensor,
    IS_COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token, is_token, place = load_tokens(history, starts, num_history, row, vocab_size, BLOCK)
    counts += row * vocab_size
    if IS_COUNTED:
        is_prompt = place < tl.load(num_prompt + row)
        one = tl.full([BLOCK], 1, tl.int32)
        tl.atomic_or(counts + token, one, mask=is_token & is_prompt)
        tl.atomic_add(counts + token, one + 1, mask=is_token & (is_prompt == 0))
    else:
        tl.store(counts + token, 0, mask=is_token)


@triton.jit(
    do_not_specialize=[
        "starts",
        "num_prompt",
        "num_history",
        "presence",
        "frequency",
        "repetition",
        "vocab_size",
    ]
)
def penalty_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    counts: tl.tensor,
    history: tl.tensor,
    starts: tl.tensor,
    num_prompt: tl.tensor,
    num_history: tl.tensor,
    rows: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    repetition: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token, is_token, _ = load_tokens(history, starts, num_history, row, vocab_size, BLOCK)
    counts += row * vocab_size
    # Of several places that have a token, one takes its count, and the others 0.
    count = tl.atomic_xchg(counts + token, tl.zeros([BLOCK], tl.int32), mask=is_token)
    is_first = is_token & (count > 0)
    place = logits + tl.load(rows + row).to(tl.int64) * stride + token
    x = tl.load(place, mask=is_first, other=0.0)
    factor = tl.load(repetition + row)
    num_generated = (count >> 1).to(tl.float32)
    penalized = tl.where(x > 0, tl.math.div_rn(x, factor), x * factor)
    less = penalized - tl.load(frequency + row) * num_generated - tl.load(presence + row)
    penalized = tl.where(num_generated > 0, less, penalized)
    tl.store(place, penalized, mask=is_first & (x > MINUS_INFINITY))


@triton.jit
def load_tokens(
    history: tl.tensor,
    starts: tl.tensor,
    num_history: tl.tensor,
    row: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a program's part of a row's tokens, which of them are in the vocabulary, and their
    places in the row."""
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < tl.load(num_history + row)
    token = tl.load(history + tl.load(starts + row) + place, mask=is_there, other=-1)
    return token, (token >= 0) & (token < vocab_size), place


def reference(logits: Tensor, penalties: Penalties, history: Tensor) -> None:
    """Do as `penalize`, in plain torch."""
    for index, row in enumerate(penalties.rows.tolist()):
        start, num_prompt = int(penalties.starts[index]), int(penalties.num_prompt[index])
        tokens = history[start : start + int(penalties.num_history[index])].tolist()
        for token in {token for token in tokens if 0 <= token < logits.shape[1]}:
            x = logits[row, token]
            if not x > -torch.inf:
                continue
            factor = penalties.repetition[index]
            x = x / factor if x > 0 else x * factor
            num_generated = tokens[num_prompt:].count(token)
            if num_generated:
                x = x - penalties.frequency[index] * num_generated - penalties.presence[index]
            logits[row, token] = x
