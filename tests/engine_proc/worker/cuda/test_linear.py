"""A product is torch's, and a row of it has the same bits wherever it stands."""

import pytest
import torch

from headrace.engine_proc.worker.cuda.linear import linear, reference

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@pytest.mark.parametrize(
    ("rows", "columns", "terms"), [(0, 5, 8), (1, 70, 3), (5, 64, 64), (66, 17, 130)]
)
@pytest.mark.parametrize(
    ("has_bias", "dtype"),
    [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16), (False, torch.float16)],
)
def test_products_are_those_of_torch(
    rows: int, columns: int, terms: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, terms).to(device, dtype)
    weight = torch.randn(columns, terms).to(device, dtype)
    bias = torch.randn(columns).to(device, dtype) if has_bias else None
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(linear(x, weight, bias), reference(x, weight, bias), **tolerance)


def test_a_row_has_the_same_bits_in_every_place(device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(70, 100, device=device), torch.randn(20, 100, device=device)
    out = linear(x, weight)
    for part in (slice(69, 70), slice(13, 24), slice(5, 69)):
        torch.testing.assert_close(linear(x[part], weight), out[part], atol=0, rtol=0)
