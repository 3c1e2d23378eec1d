"""Both products and the gate in one launch are those in two, bit by bit."""

import pytest
import torch

from headrace.engine_proc.worker.cuda.kernels.gated_activation import act_mul
from headrace.engine_proc.worker.cuda.kernels.gated_linear import (
    can_be_gated,
    gated_linear,
    reference,
)
from headrace.engine_proc.worker.cuda.kernels.linear import linear
from headrace.engine_proc.worker.cuda.matrices.dense import DenseMatrix
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation

SILU = Activation.SILU


@pytest.mark.parametrize(("has_bias", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_one_launch_has_the_bits_of_two(
    has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = torch.randn(280, 70).to(device, dtype)
    weight = (torch.randn(2 * 35, 70) / 8).to(device, dtype)
    bias = torch.randn(2 * 35).to(device, dtype) if has_bias else None
    for rows in (slice(0, 280), slice(7, 107), slice(279, 280), slice(0, 0)):
        gated = gated_linear(x[rows], weight, bias, SILU)
        torch.testing.assert_close(gated, reference(x[rows], weight, bias, SILU), atol=0.1, rtol=0)
        expected = act_mul(linear(x[rows], weight, bias), SILU)
        torch.testing.assert_close(gated, expected, atol=0, rtol=0)


def test_sums_of_parts_have_two_launches(device: torch.device) -> None:
    x, weight = torch.randn(3, 600, device=device), torch.randn(8, 600, device=device)
    assert not can_be_gated(weight)
    gated = DenseMatrix(weight).apply_gated(x, SILU)
    torch.testing.assert_close(gated, act_mul(linear(x, weight), SILU), atol=0, rtol=0)
