"""Tokens go to the experts that plain torch sends them to, and padding to none."""

import dataclasses

import pytest
import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.mixtures.router import choose_experts, reference
from headrace.engine_proc.worker.models.specs.decoder_spec import MixtureSpec, RouterScore

OF_12 = MixtureSpec(num_experts=12, experts_per_token=3, intermediate_size=8)
SIGMOID = RouterScore.SIGMOID
MIXTURES = {
    "softmax of the chosen": OF_12,
    "softmax of all": dataclasses.replace(OF_12, normalized=False, weight_scale=0.5),
    "sigmoid": dataclasses.replace(OF_12, score=SIGMOID, weight_sum_min=2.5, weight_sum_eps=0.1),
    "groups": dataclasses.replace(OF_12, score=SIGMOID, num_groups=3, groups_per_token=2),
    "one group, one score": dataclasses.replace(
        OF_12, num_groups=4, groups_per_token=1, group_score_experts=1
    ),
    "groups of one": dataclasses.replace(OF_12, num_groups=12, groups_per_token=4),
    "a softmax for each choice": dataclasses.replace(
        OF_12, score=RouterScore.SPARSEMIXER, normalized=False, sparsemixer_eps=0.2
    ),
    "a softmax for each choice, of the best alone": dataclasses.replace(
        OF_12, score=RouterScore.SPARSEMIXER, normalized=False, sparsemixer_eps=0.0
    ),
    "one expert": dataclasses.replace(OF_12, experts_per_token=1),
    "all experts": dataclasses.replace(OF_12, experts_per_token=12),
    "as many as DeepSeek": MixtureSpec(
        num_experts=256,
        experts_per_token=8,
        intermediate_size=8,
        score=SIGMOID,
        num_groups=8,
        groups_per_token=4,
        weight_scale=2.5,
    ),
}


def draw(mixture: MixtureSpec, num_tokens: int, device: torch.device) -> Tensor:
    """Return logits; many of them are equal."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, mixture.num_experts + 1, generator=generator)
    return (logits * 4).round().div(4).to(device)


# No choice by a softmax of its own has a bias.
BIASED = [name for name, one in MIXTURES.items() if one.score != RouterScore.SPARSEMIXER]
CASES = [*((name, False) for name in MIXTURES), *((name, True) for name in BIASED)]


@pytest.mark.parametrize(("name", "has_bias"), CASES)
def test_choices_are_those_of_torch(name: str, has_bias: bool, device: torch.device) -> None:
    mixture = MIXTURES[name]
    logits = draw(mixture, 21, device)
    bias = torch.arange(mixture.num_experts, device=device).remainder(3) / 2 if has_bias else None
    kv_rows = torch.arange(21, device=device)
    kv_rows[-2:] = -1
    ours = choose_experts(mixture, logits, bias, kv_rows)
    theirs = reference(mixture, logits, bias, kv_rows)
    assert torch.equal(ours.experts, theirs.experts)
    assert torch.equal(ours.counts, theirs.counts)
    torch.testing.assert_close(ours.weights, theirs.weights, atol=1e-6, rtol=1e-5)


def test_a_token_has_the_same_bits_in_every_place(device: torch.device) -> None:
    logits = draw(OF_12, 21, device)
    rows = torch.arange(21, device=device)
    whole = choose_experts(OF_12, logits, None, rows)
    for part in (slice(20, 21), slice(3, 17)):
        own = choose_experts(OF_12, logits[part], None, rows[part])
        assert torch.equal(own.experts, whole.experts[part])
        assert torch.equal(own.weights, whole.weights[part])


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's
@pytest.mark.parametrize("name", ["softmax of the chosen", "sigmoid", "groups"])
def test_experts_are_distinct_for_any_logits(name: str, device: torch.device) -> None:
    mixture = MIXTURES[name]
    logits = torch.full((3, 13), torch.nan, device=device)
    logits[1, 2:4] = 1.0
    logits[2] = -torch.inf
    choice = choose_experts(mixture, logits, None, torch.zeros(3, device=device))
    for experts in choice.experts.tolist():
        assert len({*experts} & {*range(12)}) == 3
    assert choice.counts.sum() == 9
