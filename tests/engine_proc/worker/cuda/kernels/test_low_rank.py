"""Products of low rank are torch's, and a row has the same bits with any batch mates."""

import numpy as np
import pytest
import torch
from gpu_tests import first_of
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.low_rank import expand, num_parts, reference, shrink

NUM_SLOTS = 4
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def factors(
    ranks: int, columns: int, terms: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    a = torch.randn(NUM_SLOTS, ranks, terms) / terms**0.5
    b, gains = torch.randn(NUM_SLOTS, columns, ranks), torch.randn(NUM_SLOTS, columns) / 4
    gains[1::2] = 0  # of no DoRA
    return a.to(device, dtype), b.to(device, dtype), gains.to(device)


@pytest.mark.parametrize("dtype", first_of(1, [torch.bfloat16, torch.float32]))
@pytest.mark.parametrize(
    ("rows", "columns", "terms", "ranks"),
    [(0, 5, 8, 4), (1, 70, 3, 1), (18, 64, 64, 16), (37, 17, 600, 70), (3, 20, 40, 512)],
)
@pytest.mark.parametrize("has_bias", first_of(1, [True, False]))
def test_sums_are_those_of_torch(
    rows: int,
    columns: int,
    terms: int,
    ranks: int,
    has_bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    a, b, gains = factors(ranks, columns, terms, device, dtype)
    x = torch.randn(rows, terms).to(device, dtype)
    bias = torch.randn(columns).to(device, dtype) if has_bias else None
    out = torch.randn(rows, columns).to(device, dtype)
    slots = torch.randint(-1, NUM_SLOTS, (rows,), dtype=torch.int32, device=device)
    expected = reference(out, x, a, b, gains, bias, slots)
    before = out.clone()
    shrunk = shrink(x, a, slots)
    assert len(shrunk) == num_parts(terms) == (2 if terms > 512 else 1)
    expand(out, shrunk, b, gains, bias, slots)
    torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(out[slots < 0], before[slots < 0])


def test_batch_mates_change_no_bit(device: torch.device) -> None:
    torch.manual_seed(0)
    a, b, gains = factors(8, 70, 600, device, torch.float32)
    x, base = torch.randn(40, 600, device=device), torch.randn(40, 70, device=device)
    slots = torch.randint(-1, NUM_SLOTS, (40,), dtype=torch.int32, device=device)

    def run(rows: Tensor) -> Tensor:
        out = base[rows].clone()
        expand(out, shrink(x[rows], a, slots[rows]), b, gains, None, slots[rows])
        return out

    everything = torch.arange(40, device=device)
    whole = run(everything)
    for rows in (everything.flip(0), everything[17:18], everything[3:30:2]):
        assert torch.equal(run(rows), whole[rows])


def test_what_is_infinite_stays_with_its_adapter(device: torch.device) -> None:
    torch.manual_seed(0)
    a, b, gains = factors(8, 20, 70, device, torch.float32)
    x, base = torch.randn(6, 70, device=device), torch.randn(6, 20, device=device)
    slots = torch.tensor([0, 1, 0, -1, 2, 1], dtype=torch.int32, device=device)
    out, broken = base.clone(), base.clone()
    expand(out, shrink(x, a, slots), b, gains, None, slots)
    a[1], b[1] = torch.inf, torch.nan
    with np.errstate(invalid="ignore"):  # of the interpreter
        expand(broken, shrink(x, a, slots), b, gains, None, slots)
    others = slots != 1
    assert torch.equal(out[others], broken[others])
    assert broken[~others].isnan().all()


def test_a_part_of_a_product_takes_its_ranks(device: torch.device) -> None:
    """Of matrices that are one, columns by columns."""
    torch.manual_seed(0)
    parts = [factors(8, columns, 70, device, torch.float32) for columns in (20, 12)]
    x, out = torch.randn(5, 70, device=device), torch.randn(5, 32, device=device)
    slots = torch.tensor([0, 3, 3, -1, 2], dtype=torch.int32, device=device)
    expected = [
        reference(own, x, a, b, gains, None, slots)
        for own, (a, b, gains) in zip(out.split([20, 12], 1), parts, strict=True)
    ]
    shrunk = shrink(x, torch.cat([a for a, _, _ in parts], 1), slots)
    expand(out[:, :20], shrunk[:, :, :8], *parts[0][1:], None, slots)
    expand(out[:, 20:], shrunk[:, :, 8:], *parts[1][1:], None, slots)
    torch.testing.assert_close(out, torch.cat(expected, 1), atol=1e-4, rtol=1e-4)
