"""The gate is torch's."""

from typing import Any

import pytest
import torch

from headrace.engine_proc.worker.cuda.kernels.gated_activation import (
    KINDS,
    act_mul,
    reference,
    xielu_numbers,
)
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@pytest.mark.parametrize("shape", [(0, 8), (3, 77), (1, 1030)])
@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_gate_is_that_of_torch(
    shape: tuple[int, int], activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(shape[0], 2 * shape[1]) * 3).to(device, dtype)
    tolerance = TOLERANCES[dtype]
    own: dict[str, Any] = {}
    if activation == Activation.XIELU:
        own["xielu"] = xielu_numbers(torch.tensor([0.5, -0.3, 0.6, -1e-6], device=device))
    for options in ({}, {"multiplier": 0.7}, {"is_gated": False}):
        expected = reference(gate_up, activation, **options, **own)
        found = act_mul(gate_up, activation, **options, **own)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-2)
