"""What experts give is added in the order of choice, those that are elsewhere aside."""

import dataclasses

import pytest
import torch

from headrace.engine_proc.worker.cuda.mixtures.expert_sum import add_experts, reference
from headrace.engine_proc.worker.cuda.mixtures.router import choose_experts
from headrace.engine_proc.worker.models.specs.decoder_spec import MixtureSpec

OF_5 = MixtureSpec(num_experts=5, experts_per_token=3, intermediate_size=8)
HIDDEN = 530


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("has_shared", "has_gate", "local"),
    [(False, False, None), (True, False, range(1, 3)), (True, True, None)],
)
def test_sums_are_those_of_torch(
    has_shared: bool,
    has_gate: bool,
    local: range | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    mixture = dataclasses.replace(OF_5, shared_gate=has_gate, local_experts=local)
    logits = torch.randn(6, 6).to(device)
    kv_rows = torch.tensor([4, 0, 2, 9, 5, -1], device=device)
    choice = choose_experts(mixture, logits, None, kv_rows)
    outputs = torch.randn(18, HIDDEN).to(device, dtype)
    is_here = torch.isin(choice.experts.cpu(), torch.tensor(mixture.own_experts))
    outputs[~is_here.flatten().to(device)] = torch.nan  # nothing has computed them
    shared = torch.randn(6, HIDDEN).to(device, dtype) if has_shared else None
    own = add_experts(mixture, outputs, choice, shared, logits)
    filled = outputs.nan_to_num()
    expected = reference(mixture, filled, choice, shared, logits)
    error = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(own, expected, atol=error, rtol=error)
    alone = choose_experts(mixture, logits[3:4], None, kv_rows[3:4])
    one = add_experts(
        mixture, outputs[9:12], alone, None if shared is None else shared[3:4], logits[3:4]
    )
    assert torch.equal(one[0], own[3])
