"""Weights of chosen experts are multiplied by a number of each expert; padding stays without."""

import torch

from headrace.engine_proc.worker.cuda.mixtures.expert_scales import reference, scale_weights
from headrace.engine_proc.worker.cuda.mixtures.router import choose_experts
from headrace.engine_proc.worker.models.specs.decoder_spec import MixtureSpec

MIXTURE = MixtureSpec(num_experts=5, experts_per_token=2, intermediate_size=8)


def test_weights_are_scaled_by_expert_as_in_torch(device: torch.device) -> None:
    torch.manual_seed(0)
    logits, scales = torch.randn(90, 5).to(device), torch.randn(5).to(device)
    kv_rows = torch.arange(-1, 89, device=device)
    choice = choose_experts(MIXTURE, logits, None, kv_rows)
    scaled = scale_weights(choice, scales)
    torch.testing.assert_close(scaled.weights, reference(choice, scales).weights)
    assert not scaled.weights[0].any() and scaled.weights[1:].all()
    assert torch.equal(scaled.experts, choice.experts)
    nothing = choose_experts(MIXTURE, logits[:0], None, kv_rows[:0])
    assert scale_weights(nothing, scales).weights.shape == (0, 2)
