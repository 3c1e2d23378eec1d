"""Logits of tokens that a grammar does not allow become minus infinity."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv

BLOCK = 1024
WORD_TOKENS = tl.constexpr(32)


def apply_mask(logits: Tensor, masked_rows: Tensor, masks: Tensor) -> None:
    """Mask some rows, in place.

    Args:
        logits: [rows, vocab_size], rows may lie apart.
        masked_rows: [masks], int32
        masks: [masks, words], int32, a bit for each token that is allowed, the lowest first. What
            they do not reach is not allowed.
    """
    num_masks, num_words = masks.shape
    assert masked_rows.shape == (num_masks,)
    assert masks.is_contiguous()
    assert logits.stride(1) == 1
    vocab_size = logits.shape[1]
    if num_masks:
        mask_kernel[(num_masks, cdiv(vocab_size, BLOCK))](
            logits,
            masked_rows,
            masks,
            logits.stride(0),
            num_words,
            VOCAB_SIZE=vocab_size,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )


@triton.jit
def mask_kernel(
    logits: tl.tensor,
    masked_rows: tl.tensor,
    masks: tl.tensor,
    stride: tl.tensor,
    num_words: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    mask = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tokens // WORD_TOKENS
    bits = tl.load(masks + mask * num_words + word, mask=word < num_words, other=0)
    is_banned = ((bits >> (tokens % WORD_TOKENS)) & 1) == 0
    row = tl.load(masked_rows + mask).to(tl.int64)
    nothing = tl.full([BLOCK], float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * stride + tokens, nothing, mask=is_banned & (tokens < VOCAB_SIZE))


def reference(logits: Tensor, masked_rows: Tensor, masks: Tensor) -> None:
    """Do as `apply_mask`, in plain torch."""
    octets = masks.cpu().numpy().view(np.uint8)
    bits = np.unpackbits(octets, axis=1, bitorder="little")[:, : logits.shape[1]]
    allowed = torch.zeros(len(masks), logits.shape[1], dtype=torch.bool)
    allowed[:, : bits.shape[1]] = torch.from_numpy(bits).bool()
    rows = masked_rows.long()
    logits[rows] = logits[rows].masked_fill(~allowed.to(logits.device), float("-inf"))
