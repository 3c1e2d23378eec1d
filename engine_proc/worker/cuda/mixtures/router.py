"""Which experts a token goes to, and with which weights, from its router's logits."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, next_power_of_2
from headrace.engine_proc.worker.models.specs.decoder_spec import MixtureSpec, RouterScore
from headrace.engine_proc.worker.reference import torch_mixture

BLOCK_TOKENS = 8
NEAREST = 1e-30  # FAR of 0 says that no expert is left out
MINUS_INFINITY = tl.constexpr(float("-inf"))


@dataclass(frozen=True)
class ExpertChoice:
    """The experts of tokens."""

    experts: Tensor  # [tokens, experts per token], int32, the best first; padding has -1
    weights: Tensor  # [tokens, experts per token], fp32
    counts: Tensor  # [blocks of tokens, experts], int32, how many of them chose an expert

    @property
    def num_pairs(self) -> int:
        """How many pairs of a token and one of its experts there are, padding included."""
        return self.experts.numel()


def choose_experts(
    mixture: MixtureSpec, logits: Tensor, selection_bias: Tensor | None, kv_rows: Tensor
) -> ExpertChoice:
    """Choose the experts of each token; among equals, the lower index is better.

    Args:
        logits: [tokens, experts or more], fp32; experts come first.
        selection_bias: [experts], fp32.
        kv_rows: [tokens], below 0 for padding.
    """
    num_tokens, num_chosen = len(logits), mixture.experts_per_token
    is_sparse = mixture.score == RouterScore.SPARSEMIXER
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    num_blocks = cdiv(num_tokens, BLOCK_TOKENS)
    experts = logits.new_empty(num_tokens, num_chosen, dtype=torch.int32)
    weights = logits.new_empty(num_tokens, num_chosen)
    counts = logits.new_empty(num_blocks, mixture.num_experts, dtype=torch.int32)
    if num_tokens:
        router_kernel[(num_blocks,)](
            experts,
            weights,
            counts,
            logits,
            logits if selection_bias is None else selection_bias,
            kv_rows,
            num_tokens,
            logits.stride(0),
            NUM_EXPERTS=mixture.num_experts,
            NUM_CHOSEN=num_chosen,
            IS_SOFTMAX=mixture.score == RouterScore.SOFTMAX,
            FAR=max(2 * mixture.sparsemixer_eps, NEAREST) if is_sparse else 0.0,
            HAS_BIAS=selection_bias is not None,
            NUM_GROUPS=mixture.num_groups,
            NUM_KEPT_GROUPS=mixture.groups_per_token,
            GROUP_SCORES=min(
                mixture.group_score_experts, mixture.num_experts // mixture.num_groups
            ),
            IS_NORMALIZED=mixture.normalized,
            SUM_MIN=mixture.weight_sum_min,
            SUM_EPS=mixture.weight_sum_eps,
            SCALE=mixture.weight_scale,
            BLOCK_TOKENS=BLOCK_TOKENS,
            BLOCK_EXPERTS=next_power_of_2(mixture.num_experts),
            BLOCK_CHOSEN=next_power_of_2(num_chosen),
            BLOCK_GROUPS=next_power_of_2(mixture.num_groups),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return ExpertChoice(experts, weights, counts)


@triton.jit(do_not_specialize=["num_tokens"])
def router_kernel(
    experts: tl.tensor,
    weights: tl.tensor,
    counts: tl.tensor,
    logits: tl.tensor,
    selection_bias: tl.tensor,
    kv_rows: tl.tensor,
    num_tokens: tl.tensor,
    stride: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    FAR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT_GROUPS: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    SUM_MIN: tl.constexpr,
    SUM_EPS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> None:
    token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    expert, slot = tl.arange(0, BLOCK_EXPERTS)[None, :], tl.arange(0, BLOCK_CHOSEN)[None, :]
    is_token, is_expert = (token < num_tokens)[:, None], expert < NUM_EXPERTS
    is_real = is_token & (tl.load(kv_rows + token, mask=token < num_tokens, other=-1) >= 0)[:, None]
    x = tl.load(logits + token[:, None] * stride + expert, mask=is_token & is_expert, other=0.0)
    scores = x if FAR > 0 else score(x, is_expert, IS_SOFTMAX)
    ranks = scores
    if HAS_BIAS:
        ranks += tl.load(selection_bias + expert, mask=is_expert, other=0.0)
    ranks = tl.where(is_expert & (ranks == ranks), ranks, MINUS_INFINITY)  # NaN is the worst
    if NUM_GROUPS > 1:
        ranks = keep_best_groups(
            ranks,
            expert,
            NUM_EXPERTS // NUM_GROUPS,
            NUM_GROUPS,
            NUM_KEPT_GROUPS,
            GROUP_SCORES,
            BLOCK_GROUPS,
        )
    is_taken = (expert >= NUM_EXPERTS) & (ranks == ranks)
    chosen = tl.full([BLOCK_TOKENS, BLOCK_CHOSEN], -1, tl.int32)
    own = tl.zeros([BLOCK_TOKENS, BLOCK_CHOSEN], tl.float32)
    for n in range(NUM_CHOSEN):
        best = best_of(ranks, is_taken, expert)
        is_best = expert == best[:, None]
        weight = tl.sum(tl.where(is_best, scores, 0.0), 1)
        if FAR > 0:
            weight = share_of_near(scores, weight[:, None], is_taken, FAR)
        chosen = tl.where(slot == n, best[:, None], chosen)
        own = tl.where(slot == n, weight[:, None], own)
        is_taken = is_taken | is_best
    if IS_NORMALIZED:
        own = own / (tl.maximum(tl.sum(own, 1), SUM_MIN) + SUM_EPS)[:, None]
    own = own * SCALE
    at, is_slot = token[:, None] * NUM_CHOSEN + slot, is_token & (slot < NUM_CHOSEN)
    tl.store(experts + at, tl.where(is_real, chosen, -1), mask=is_slot)
    tl.store(weights + at, tl.where(is_real, own, 0.0), mask=is_slot)
    counted = tl.sum((is_taken & is_expert & is_real).to(tl.int32), 0)
    place = counts + tl.program_id(0).to(tl.int64) * NUM_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    tl.store(place, counted, mask=tl.arange(0, BLOCK_EXPERTS) < NUM_EXPERTS)


@triton.jit
def score(x: tl.tensor, is_expert: tl.tensor, IS_SOFTMAX: tl.constexpr) -> tl.tensor:
    """Return the scores of experts, [tokens, experts]."""
    if IS_SOFTMAX:
        x = tl.where(is_expert, x, MINUS_INFINITY)
        x = tl.exp(x - tl.max(x, 1)[:, None])
        return x / tl.sum(x, 1)[:, None]
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def share_of_near(
    x: tl.tensor, largest: tl.tensor, is_taken: tl.tensor, FAR: tl.constexpr
) -> tl.tensor:
    """Return the share that the largest logit has in a softmax of those not far below it."""
    factor = tl.maximum(tl.abs(x), largest)
    is_near = (largest - x) / tl.where(factor == 0, 1.0, factor) <= FAR
    return 1.0 / tl.sum(tl.where(is_near & (is_taken == 0), tl.exp(x - largest), 0.0), 1)


@triton.jit
def best_of(ranks: tl.tensor, is_taken: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Return the first of the best of each row that are not taken."""
    left = tl.where(is_taken, MINUS_INFINITY, ranks)
    is_best = (left == tl.max(left, 1)[:, None]) & (is_taken == 0)
    return tl.min(tl.where(is_best, index, ranks.shape[1]), 1)


@triton.jit
def keep_best_groups(
    ranks: tl.tensor,
    expert: tl.tensor,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    NUM_SCORES: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> tl.tensor:
    """Return ranks that are minus infinity outside of the best groups."""
    group = tl.arange(0, BLOCK_GROUPS)[None, :]
    scores = tl.full([ranks.shape[0], BLOCK_GROUPS], MINUS_INFINITY, tl.float32)
    for n in range(NUM_GROUPS):
        is_taken = (expert // SIZE != n) & (ranks == ranks)
        total = tl.zeros([ranks.shape[0]], tl.float32)
        for _ in range(NUM_SCORES):
            is_best = expert == best_of(ranks, is_taken, expert)[:, None]
            total += tl.sum(tl.where(is_best, ranks, 0.0), 1)
            is_taken = is_taken | is_best
        scores = tl.where(group == n, total[:, None], scores)
    is_taken = (group >= NUM_GROUPS) & (scores == scores)
    is_kept = (expert < 0) & (ranks == ranks)
    for _ in range(NUM_KEPT):
        best = best_of(scores, is_taken, group)[:, None]
        is_taken = is_taken | (group == best)
        is_kept = is_kept | (expert // SIZE == best)
    return tl.where(is_kept, ranks, MINUS_INFINITY)


def reference(
    mixture: MixtureSpec, logits: Tensor, selection_bias: Tensor | None, kv_rows: Tensor
) -> ExpertChoice:
    """Do as `choose_experts`, in plain torch."""
    own = logits[:, : mixture.num_experts]
    experts, weights = torch_mixture.choose_experts(mixture, own, selection_bias)
    is_padding = (kv_rows < 0)[:, None]
    experts = experts.int().masked_fill(is_padding, -1)
    is_chosen = torch.nn.functional.one_hot(experts.long() + 1, mixture.num_experts + 1)
    blocks = is_chosen.sum(1)[:, 1:].split(BLOCK_TOKENS)
    counts = torch.stack([block.sum(0) for block in blocks]).int()
    return ExpertChoice(experts, weights.masked_fill(is_padding, 0.0), counts)
