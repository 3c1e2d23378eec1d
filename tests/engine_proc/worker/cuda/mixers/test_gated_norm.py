"""Gates with and without norms are torch's, and groups do not depend on each other."""

from typing import Any

import pytest
import torch

from headrace.engine_proc.worker.cuda.mixers.gated_norm import (
    CutNorms,
    GateOrder,
    gated_norm,
    reference,
)

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("order", GateOrder)
@pytest.mark.parametrize("shape", [(3, 5, 13), (2, 1, 1500)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_gates_and_norms_are_those_of_torch(
    dtype: torch.dtype, shape: tuple[int, int, int], order: GateOrder, device: torch.device
) -> None:
    torch.manual_seed(0)
    num_tokens, num_groups, size = shape
    x = torch.randn(num_tokens, num_groups * size, device=device)
    gate = torch.randn(num_tokens, num_groups * size + 3, device=device).to(dtype)[:, 3:]
    for num_weights in (size, num_groups * size):
        weight = None if order == GateOrder.NO_NORM else torch.randn(num_weights, device=device)
        for more in ({"is_sigmoid": True}, {"multiplier": 0.7}):
            options: dict[str, Any] = {"group_size": size, "eps": 1e-3} | more
            found = gated_norm(x, gate, weight, order, **options)
            assert found.dtype == dtype
            expected = reference(x, gate, weight, order, **options)
            tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
            torch.testing.assert_close(found, expected, **tolerance)


def test_no_other_token_changes_a_bit_of_a_gate(device: torch.device) -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(2, 11, 60, device=device)
    weight = torch.randn(20, device=device)
    options: dict[str, Any] = {"group_size": 20, "eps": 1e-3}
    assert gated_norm(x[:0], gate[:0], None, GateOrder.NO_NORM, group_size=20).shape == (0, 60)
    out = gated_norm(x, gate, weight, GateOrder.GATE_FIRST, **options)
    alone = gated_norm(x[10:], gate[10:], weight, GateOrder.GATE_FIRST, **options)
    assert torch.equal(alone, out[10:])


@pytest.mark.parametrize("share", [range(0, 25), range(25, 48), range(8, 13), range(16, 48)])
@pytest.mark.parametrize("order", [GateOrder.NORM_FIRST, GateOrder.GATE_FIRST])
def test_norms_of_several_workers_are_those_of_one(
    order: GateOrder, share: range, device: torch.device
) -> None:
    """Of three norms of 16 numbers; the other workers' squares are torch's."""
    torch.manual_seed(0)
    x, gate = torch.randn(2, 7, 48, device=device)
    weight = torch.randn(48, device=device)
    factors = torch.nn.functional.silu(0.7 * gate) if order == GateOrder.GATE_FIRST else 1.0
    all_squares = (x * factors).square()
    foreign = all_squares.clone()
    foreign[:, share] = 0

    def sums(squares: torch.Tensor) -> torch.Tensor:
        return squares.view(len(squares), 3, 16).sum(2)

    def run(rows: slice) -> torch.Tensor:
        cut = CutNorms(share.start, 3, lambda own: own + sums(foreign[rows]))
        parts = (whole[rows, share.start : share.stop].contiguous() for whole in (x, gate))
        own_weight = weight[share.start : share.stop]
        options: dict[str, Any] = {"group_size": 16, "eps": 1e-3, "multiplier": 0.7}
        return gated_norm(*parts, own_weight, order, **options, cut=cut)

    found = run(slice(None))
    expected = reference(x, gate, weight, order, group_size=16, eps=1e-3, multiplier=0.7)
    torch.testing.assert_close(found, expected[:, share.start : share.stop])
    assert torch.equal(run(slice(6, 7)), found[6:])
