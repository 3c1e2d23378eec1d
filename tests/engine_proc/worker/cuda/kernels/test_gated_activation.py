"""The gate is torch's."""

import pytest
import torch

from headrace.engine_proc.worker.cuda.kernels.gated_activation import KINDS, act_mul, reference
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
    for options in ({}, {"multiplier": 0.7}, {"is_gated": False}):
        expected = reference(gate_up, activation, **options)
        found = act_mul(gate_up, activation, **options)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-2)
