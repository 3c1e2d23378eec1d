"""Multiplies the weights of chosen experts by a number of each expert."""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv
from headrace.engine_proc.worker.cuda.mixtures.router import ExpertChoice

BLOCK = 128


def scale_weights(choice: ExpertChoice, scales: Tensor) -> ExpertChoice:
    """Return a choice whose weights are multiplied; those of padding stay 0.

    Args:
        scales: [experts], fp32.
    """
    weights = torch.empty_like(choice.weights)
    num_pairs = choice.num_pairs
    if num_pairs:
        scale_kernel[(cdiv(num_pairs, BLOCK),)](
            weights,
            choice.weights,
            choice.experts,
            scales,
            num_pairs,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return replace(choice, weights=weights)


@triton.jit(do_not_specialize=["num_pairs"])
def scale_kernel(
    out: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    scales: tl.tensor,
    num_pairs: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = pair < num_pairs
    expert = tl.load(experts + pair, mask=is_pair, other=-1)
    scale = tl.load(scales + expert, mask=expert >= 0, other=0.0)
    weight = tl.load(weights + pair, mask=is_pair, other=0.0)
    tl.store(out + pair, weight * scale, mask=is_pair)


def reference(choice: ExpertChoice, scales: Tensor) -> ExpertChoice:
    """Do as `scale_weights`, in plain torch."""
    own = scales[choice.experts.clamp(min=0)].masked_fill(choice.experts < 0, 0)
    return replace(choice, weights=choice.weights * own)
