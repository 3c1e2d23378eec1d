"""Penalties on tokens that a row has: `RowSampler::penalize` of `csrc/sampling/sampler_row.cpp`."""

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
    starts: Tensor  # int32, where the row's tokens begin in the history,
    num_prompt: Tensor  # int32, how many of them, the first, are the prompt's,
    num_history: Tensor  # int32, and how many there are
    presence: Tensor  # fp32, of tokens generated
    frequency: Tensor  # fp32, the same, times how often
    repetition: Tensor  # fp32, of tokens generated or in the prompt: a factor


def penalize(logits: Tensor, penalties: Penalties, history: Tensor) -> None:
    """Penalize tokens in some rows, in place; those beyond the vocabulary are passed over.

    Args:
        logits: [all rows, vocab_size], fp32, rows may lie apart.
        history: int32
    """
    num_rows, vocab_size = len(penalties.rows), logits.shape[1]
    assert logits.stride(1) == 1
    if num_rows == 0:
        return
    # Twice how often each token was generated, and 1 if it is in the prompt.
    counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
    count_kernel[(num_rows,)](
        counts,
        history,
        penalties.starts,
        penalties.num_prompt,
        penalties.num_history,
        VOCAB_SIZE=vocab_size,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )
    penalty_kernel[(num_rows, cdiv(vocab_size, BLOCK))](
        logits,
        logits.stride(0),
        counts,
        penalties.rows,
        penalties.presence,
        penalties.frequency,
        penalties.repetition,
        VOCAB_SIZE=vocab_size,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["starts", "num_prompt", "num_history"])
def count_kernel(
    counts: tl.tensor,
    history: tl.tensor,
    starts: tl.tensor,
    num_prompt: tl.tensor,
    num_history: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    counts += row * VOCAB_SIZE
    history += tl.load(starts + row)
    of_prompt, end = tl.load(num_prompt + row), tl.load(num_history + row)
    for first in range(0, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        token = tl.load(history + place, mask=place < end, other=-1)
        is_token = (token >= 0) & (token < VOCAB_SIZE)
        is_prompt = place < of_prompt
        one = tl.full([BLOCK], 1, tl.int32)
        tl.atomic_or(counts + token, one, mask=is_token & is_prompt)
        tl.atomic_add(counts + token, one + 1, mask=is_token & (is_prompt == 0))


@triton.jit(do_not_specialize=["presence", "frequency", "repetition"])
def penalty_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    counts: tl.tensor,
    rows: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    repetition: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < VOCAB_SIZE
    count = tl.load(counts + row * VOCAB_SIZE + token, mask=is_token, other=0)
    place = logits + tl.load(rows + row).to(tl.int64) * stride + token
    x = tl.load(place, mask=is_token, other=0.0)
    factor = tl.load(repetition + row)
    num_generated = (count >> 1).to(tl.float32)
    penalized = tl.where(x > 0, tl.math.div_rn(x, factor), x * factor)
    less = penalized - tl.load(frequency + row) * num_generated - tl.load(presence + row)
    penalized = tl.where(num_generated > 0, less, penalized)
    tl.store(place, penalized, mask=is_token & (count > 0) & (x > MINUS_INFINITY))


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
