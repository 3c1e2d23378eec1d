"""Products of 8-bit floats are those of what the floats stand for."""

from dataclasses import replace

import pytest
import torch
from gpu_tests import RUNS_ALL, first_of

from headrace.engine_proc.worker.cuda.kernels.e4m3_rows import (
    E4M3,
    rounded_reference,
    rounded_rows,
)
from headrace.engine_proc.worker.cuda.matrices import fp8
from headrace.engine_proc.worker.cuda.matrices.fp8 import Fp8Matrix, fp8_reference


def random_matrix(columns: int, terms: int, group: int, device: torch.device) -> Fp8Matrix:
    torch.manual_seed(0)
    codes = (torch.randn(columns, terms) * 60).to(E4M3)
    scales = 0.001 + 0.01 * torch.rand(columns, -(-terms // group))
    return Fp8Matrix(codes.to(device), scales.to(device), group, torch.randn(columns).to(device))


@pytest.mark.parametrize("group", [130, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_torch_rounds(
    group: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, 130) * torch.logspace(-6, 4, 130)).to(device, dtype)
    x[3] = 0
    codes, scales = rounded_rows(x, group)
    expected_codes, expected_scales = rounded_reference(x, group)
    torch.testing.assert_close(scales, expected_scales)
    torch.testing.assert_close(codes.float(), expected_codes.float(), rtol=0, atol=0)
    assert rounded_rows(x[:0], group)[0].shape == (0, 130)


@pytest.mark.parametrize(
    ("columns", "terms", "group"), [(32, 64, 64), (17, 130, 130), (40, 272, 128)]
)
@pytest.mark.parametrize("rows", [1, 66])
@pytest.mark.parametrize("dtype", first_of(1, [torch.bfloat16, torch.float32]))
def test_products_are_those_of_torch(
    columns: int, terms: int, group: int, rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    matrix = random_matrix(columns, terms, group, device)
    matrix = replace(matrix, bias=None if rows == 1 else matrix.bias.to(dtype))  # type: ignore[union-attr]
    x = torch.randn(rows, terms, device=device).to(dtype)
    assert matrix.apply(x[:0]).shape == (0, columns)
    tolerance = {"atol": 1e-4, "rtol": 1e-4}
    if dtype == torch.bfloat16:
        tolerance = {"atol": 0.02, "rtol": 0.01}
    torch.testing.assert_close(matrix.apply(x), fp8_reference(x, matrix), **tolerance)


def test_a_row_has_the_same_bits_in_every_place_in_blocks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are those of programs that share a tile, then those of one that has it alone."""
    matrix = random_matrix(20, 600, 128, device)
    x = torch.randn(70 if RUNS_ALL else 25, 600, device=device)
    assert fp8.part_terms(20, 600) == 256  # three parts, two of which have two blocks
    out = matrix.apply(x)
    for part in (slice(len(x) - 1, None), slice(13, 24)):
        torch.testing.assert_close(matrix.apply(x[part]), out[part], atol=0, rtol=0)
        assert not matrix.turns.any()
    monkeypatch.setattr(fp8, "ENOUGH_PROGRAMS", 1)
    for part in (slice(None), slice(len(x) - 1, None), slice(13, 24)):
        torch.testing.assert_close(matrix.apply(x[part]), out[part], atol=0, rtol=0)
