"""Products with 4 bits are those with the numbers they stand for, bit by bit."""

from dataclasses import replace

import pytest
import torch

from headrace.engine_proc.worker.cuda.kernels.linear import linear
from headrace.engine_proc.worker.cuda.matrices.int4 import Int4Matrix, can_hold, int4_reference


def random_matrix(columns: int, terms: int, group: int, device: torch.device) -> Int4Matrix:
    torch.manual_seed(0)
    num_groups = terms // group
    return Int4Matrix(
        codes=torch.randint(0, 256, (columns, terms // 2), dtype=torch.uint8).to(device),
        zeros=torch.randint(0, 17, (columns, num_groups), dtype=torch.uint8).to(device),
        scales=(0.01 + 0.1 * torch.rand(columns, num_groups)).to(device),
        group_size=group,
        order=torch.randperm(terms).to(device),
        bias=torch.randn(columns).to(device),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("columns", "terms", "group"), [(20, 96, 32), (70, 128, 64), (9, 256, 128), (17, 82, 82)]
)
def test_products_are_those_of_what_it_decodes_to(
    columns: int, terms: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    matrix = random_matrix(columns, terms, group, device)
    matrix = replace(matrix, bias=matrix.bias.to(dtype))  # type: ignore[union-attr]
    decoded = matrix.decoded(dtype)
    torch.testing.assert_close(decoded, int4_reference(matrix, dtype), atol=0, rtol=0)
    x = torch.randn(5, terms, device=device).to(dtype)
    assert matrix.order is not None
    expected = linear(x[:, matrix.order].contiguous(), decoded, matrix.bias)
    torch.testing.assert_close(matrix.apply(x), expected, atol=0, rtol=0)


@pytest.mark.parametrize("terms", [192, 576])  # in one part, and in three
def test_a_row_has_the_same_bits_in_every_place_and_either_way(
    terms: int, device: torch.device
) -> None:
    matrix = random_matrix(20, terms, 64, device)
    x = torch.randn(70, terms, device=device)
    out = replace(matrix, many_rows=70).apply(x)  # decoded before
    for part in (slice(0, 70), slice(69, 70), slice(13, 24), slice(0, 0)):
        torch.testing.assert_close(matrix.apply(x[part]), out[part], atol=0, rtol=0)


def test_groups_that_would_be_cut_by_tiles_are_not_held() -> None:
    assert can_hold(256, 32) and can_hold(256, 128) and can_hold(80, 80)
    assert not can_hold(96, 48) and not can_hold(33, 33)
