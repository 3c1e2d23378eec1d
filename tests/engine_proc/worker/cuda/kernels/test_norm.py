"""Norms are torch's, with and without the sum before them, and rows do not depend on each other."""

import pytest
import torch

from headrace.engine_proc.worker.cuda.kernels.norm import add_norm, norm, reference, reference_sum
from headrace.engine_proc.worker.cuda.kernels.numerics import Scaling

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = [(1, 1), (13, 100), (2, 1500)]
SCALINGS = [Scaling.RMS, Scaling.RMS_ONE_PLUS, Scaling.LAYER, Scaling.LAYER_ONE_PLUS]
EPS = 1e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_norms_are_those_of_torch(
    shape: tuple[int, int], scaling: Scaling, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, *shape).to(device, dtype)
    weight = torch.randn(shape[1], device=device)
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    expected = reference(x, weight, scaling=scaling, eps=EPS)
    torch.testing.assert_close(norm(x, weight, scaling=scaling, eps=EPS), expected, **tolerance)

    total, bias = reference_sum(x, residual, 0.5), torch.randn(shape[1], device=device)
    out = add_norm(x, residual, weight, scaling=scaling, eps=EPS, bias=bias, multiplier=0.5)
    torch.testing.assert_close(residual, total, atol=0, rtol=0)
    expected = reference(total, weight, scaling=scaling, eps=EPS, bias=bias)
    torch.testing.assert_close(out, expected, **tolerance)


def test_columns_of_a_matrix_are_normed_in_place(device: torch.device) -> None:
    torch.manual_seed(0)
    matrix, weight = torch.randn(9, 40, device=device), torch.randn(10, device=device)
    before = matrix.clone()
    part = matrix[:, 20:30]
    norm(part, weight, scaling=Scaling.RMS, eps=EPS, out=part)
    expected = reference(before[:, 20:30], weight, scaling=Scaling.RMS, eps=EPS)
    torch.testing.assert_close(part, expected)
    before[:, 20:30] = part
    torch.testing.assert_close(matrix, before, atol=0, rtol=0)


def test_no_other_row_changes_a_bit(device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(11, 100, device=device), torch.randn(100, device=device)
    out = norm(x, weight, scaling=Scaling.RMS, eps=EPS)
    alone = norm(x[10:], weight, scaling=Scaling.RMS, eps=EPS)
    torch.testing.assert_close(alone, out[10:], atol=0, rtol=0)


def test_no_rows_are_no_work(device: torch.device) -> None:
    x = torch.empty(0, 8, device=device)
    assert norm(x, torch.ones(8, device=device), scaling=Scaling.RMS, eps=EPS).shape == (0, 8)
