"""Adds what a token's experts give, in the order of choice, and what the shared MLP gives."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, rounded
from headrace.engine_proc.worker.cuda.mixtures.router import ExpertChoice
from headrace.engine_proc.worker.models.specs.decoder_spec import MixtureSpec

BLOCK = 512


def add_experts(
    mixture: MixtureSpec,
    outputs: Tensor,
    choice: ExpertChoice,
    shared: Tensor | None,
    logits: Tensor,
) -> Tensor:
    """Return the sums of the experts whose weights are here, added in fp32 and rounded once.

    Args:
        outputs: of each pair's expert, [pairs, hidden].
        shared: of the shared MLP, [tokens, hidden].
        logits: [tokens, experts or more]; that of the shared MLP's gate is behind the experts'.
    """
    num_tokens, hidden = len(choice.experts), outputs.shape[1]
    out = outputs.new_empty(num_tokens, hidden)
    if num_tokens:
        sum_kernel[(num_tokens, cdiv(hidden, BLOCK))](
            out,
            outputs,
            choice.experts,
            choice.weights,
            out if shared is None else shared,
            logits,
            logits.stride(0),
            mixture.own_experts.start,
            mixture.own_experts.stop,
            NUM=hidden,
            NUM_CHOSEN=mixture.experts_per_token,
            NUM_EXPERTS=mixture.num_experts,
            HAS_SHARED=shared is not None,
            HAS_GATE=mixture.shared_gate,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["first_expert", "end_expert"])
def sum_kernel(
    out: tl.tensor,
    outputs: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    shared: tl.tensor,
    logits: tl.tensor,
    stride: tl.tensor,
    first_expert: tl.tensor,
    end_expert: tl.tensor,
    NUM: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_number = at < NUM
    sums = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + slot
        expert = tl.load(experts + pair)
        is_here = (expert >= first_expert) & (expert < end_expert)
        end = tl.where(is_here, NUM, 0)
        output = tl.load(outputs + pair * NUM + at, mask=at < end, other=0.0)
        sums += output.to(tl.float32) * tl.load(weights + pair)
    if HAS_SHARED:
        weight = 1.0
        if HAS_GATE:
            weight = 1.0 / (1.0 + tl.exp(-tl.load(logits + token * stride + NUM_EXPERTS)))
        output = tl.load(shared + token * NUM + at, mask=is_number, other=0.0)
        sums += output.to(tl.float32) * weight
    tl.store(out + token * NUM + at, rounded(sums, out.dtype.element_ty), mask=is_number)


def reference(
    mixture: MixtureSpec,
    outputs: Tensor,
    choice: ExpertChoice,
    shared: Tensor | None,
    logits: Tensor,
) -> Tensor:
    """Do as `add_experts`, in plain torch."""
    own = mixture.own_experts
    is_here = (choice.experts >= own.start) & (choice.experts < own.stop)
    terms = outputs.view(*choice.experts.shape, -1).float() * choice.weights[:, :, None]
    sums = terms.masked_fill(~is_here[:, :, None], 0).sum(1)
    if shared is not None:
        gate = logits[:, mixture.num_experts, None].sigmoid() if mixture.shared_gate else 1.0
        sums += shared.float() * torch.as_tensor(gate)
    return sums.to(outputs.dtype)
