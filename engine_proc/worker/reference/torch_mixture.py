"""Routes tokens to experts in plain torch: the reference for the C++ core."""

import torch
from torch import Tensor

from headrace.engine_proc.worker.models.specs.decoder_spec import MixtureSpec, RouterScore


def choose_experts(
    mixture: MixtureSpec, logits: Tensor, selection_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, the best first, and their weights: [tokens, chosen].

    Args:
        logits: of the router, fp32, [tokens, experts]
    """
    if mixture.score == RouterScore.SPARSEMIXER:
        experts, weights = mix_sparsely(mixture, logits)
    else:
        is_softmax = mixture.score == RouterScore.SOFTMAX
        scores = torch.softmax(logits, -1) if is_softmax else torch.sigmoid(logits)
        ranks = scores if selection_bias is None else scores + selection_bias
        if mixture.num_groups > 1:
            ranks = keep_best_groups(mixture, ranks)
        experts = best(ranks, mixture.experts_per_token)
        weights = scores.gather(-1, experts)
    if mixture.normalized:
        total = weights.sum(-1, keepdim=True).clamp(min=mixture.weight_sum_min)
        weights = weights / (total + mixture.weight_sum_eps)
    return experts, weights * mixture.weight_scale


def best(ranks: Tensor, count: int) -> Tensor:
    """Return the places of the largest numbers of each row, the first among equals first."""
    return torch.sort(ranks, dim=-1, descending=True, stable=True).indices[..., :count]


def keep_best_groups(mixture: MixtureSpec, ranks: Tensor) -> Tensor:
    """Return ranks that are minus infinity outside of the best groups."""
    groups = ranks.view(len(ranks), mixture.num_groups, -1)
    scores = groups.topk(min(mixture.group_score_experts, groups.shape[-1])).values.sum(-1)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(-1, best(scores, mixture.groups_per_token), True)
    return groups.masked_fill(~kept[..., None], -torch.inf).view_as(ranks)


def mix_sparsely(mixture: MixtureSpec, logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `sparsemixer` of transformers' PhimoeSparseMoeBlock, for any number of choices."""
    left = logits
    experts, weights = [], []
    for _ in range(mixture.experts_per_token):
        chosen = best(left, 1)
        largest = left.gather(-1, chosen)
        distance = (largest - logits) / logits.abs().clamp(min=largest)
        near = left.masked_fill(distance > 2 * mixture.sparsemixer_eps, -torch.inf)
        experts.append(chosen)
        weights.append(torch.softmax(near, -1).gather(-1, chosen))
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(experts, -1), torch.cat(weights, -1)
