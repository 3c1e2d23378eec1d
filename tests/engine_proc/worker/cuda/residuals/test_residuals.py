"""What is around layers is torch's, and no row changes a bit of another."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import Scaling
from headrace.engine_proc.worker.cuda.residuals import altup, cut_gates, layer_inputs, normed_sum
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GELU, EPS, NUM = Activation.GELU_TANH, 1e-3, 50
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES)


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(device, dtype)


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    tolerance = TOLERANCES[ours.dtype]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize(
    "parts", [set(), {"residual", "factor"}, {"residual", "other", "plain"}, {"other"}]
)
def test_sums_of_norms_are_those_of_torch(
    parts: set[str], dtype: torch.dtype, device: torch.device
) -> None:
    x, y, residual, plain = random(device, dtype, 4, 23, NUM)
    weight, other_weight, factor = random(device, torch.float32, 3, NUM)

    def terms(rows: slice, given: Tensor) -> dict[str, Any]:
        return {
            "x": (x[rows], weight),
            "y": (y[rows], other_weight) if "other" in parts else None,
            "scaling": Scaling.RMS,
            "eps": EPS,
            "residual": given[rows] if "residual" in parts else None,
            "plain": plain[rows] if "plain" in parts else None,
            "multiplier": 0.7,
            "factor": factor[:1] if "factor" in parts else None,
        }

    all_rows, last = slice(23), slice(22, 23)
    expected = normed_sum.reference(**terms(all_rows, residual))
    whole, alone = residual.clone(), residual.clone()
    out = normed_sum.normed_sum(**terms(all_rows, whole))
    assert_near(out, expected)
    assert ("residual" in parts) == (out.data_ptr() == whole.data_ptr())
    again = normed_sum.normed_sum(**terms(last, alone))
    torch.testing.assert_close(again, out[last], atol=0, rtol=0)


@DTYPES
def test_embeddings_for_layers_meet_gates_as_in_torch(
    dtype: torch.dtype, device: torch.device
) -> None:
    size, num_layers = 24, 3
    context, embeds = random(device, dtype, 2, 5, num_layers * size)
    weight, gates = random(device, torch.float32, size), random(device, dtype, 5, size)
    inputs = layer_inputs.layer_inputs(context, embeds, weight, EPS)
    assert_near(inputs, layer_inputs.reference_inputs(context, embeds, weight, EPS))
    met = layer_inputs.meet_inputs(gates, inputs, 1, GELU)
    assert_near(met, layer_inputs.reference_met(gates, inputs, 1, GELU))
    alone = layer_inputs.layer_inputs(context[4:], embeds[4:], weight, EPS)
    torch.testing.assert_close(alone, inputs[4:], atol=0, rtol=0)


@DTYPES
@pytest.mark.parametrize("count", [2, 3, 4])
def test_residuals_are_mixed_as_in_torch(
    count: int, dtype: torch.dtype, device: torch.device
) -> None:
    wide = torch.float32
    x, change = random(device, dtype, 2, 5, NUM)
    projected = 3 * random(device, dtype, 5, (count - 1) * NUM)
    projected[1, :NUM] = 0  # a residual without a magnitude
    norm, matrix = random(device, wide, NUM), random(device, wide, count, NUM)
    router = altup.ModeRouter(norm, matrix, EPS)
    residuals = altup.begin(x, projected)
    assert_near(residuals, altup.reference_begin(x, projected))
    weights = random(device, wide, count * count, count)
    predicted, first = altup.predict(residuals, router, weights)
    assert_near(predicted, altup.reference_predict(residuals, router, weights))
    torch.testing.assert_close(first, predicted[:, 0], atol=0, rtol=0)
    for scale in (None, random(device, wide, NUM)):
        given = predicted, first + change, router, weights[:count], scale
        for ours, theirs in zip(
            altup.correct(*given), altup.reference_correct(*given), strict=True
        ):
            assert_near(ours, theirs)


@DTYPES
def test_a_layer_s_embeddings_go_to_all_residuals_but_the_first(
    dtype: torch.dtype, device: torch.device
) -> None:
    residuals, x = random(device, dtype, 5, 3, NUM), random(device, dtype, 5, NUM)
    weight, before = random(device, torch.float32, NUM), residuals.clone()
    altup.spread(residuals, x, weight, EPS)
    torch.testing.assert_close(residuals[:, 0], before[:, 0], atol=0, rtol=0)
    normed = torch.nn.functional.rms_norm(x.float(), (NUM,), weight, EPS)
    assert_near(residuals[:, 1:], (before[:, 1:].float() + normed[:, None]).to(dtype))


@DTYPES
def test_the_mean_of_residuals_is_that_of_torch(dtype: torch.dtype, device: torch.device) -> None:
    first, back = random(device, dtype, 5, NUM), 4 * random(device, dtype, 2, 5, NUM)
    back[1, 2] = 0
    out = altup.join(first, back)
    assert_near(out, altup.reference_join(first, back))
    alone = altup.join(first[4:], back[:, 4:].contiguous())
    torch.testing.assert_close(alone, out[4:], atol=0, rtol=0)


@DTYPES
@pytest.mark.parametrize("cut", [1.2, -0.4])
def test_gates_are_cut_as_in_torch(cut: float, dtype: torch.dtype, device: torch.device) -> None:
    """In one launch, and in three with sums over workers between, where each has half of them."""
    gate_up = random(device, dtype, 4, 2 * NUM)
    gates, ups = gate_up.chunk(2, 1)
    out = cut_gates.cut_gates(gate_up, GELU, cut, NUM)
    assert_near(out, cut_gates.reference(gate_up, GELU, cut))
    assert 0 < int((out == 0).sum()) < out.numel()
    half = torch.cat([gates[:, :25], ups[:, :25]], 1)
    wide = gates.float()
    others = iter((wide[:, 25:].sum(1), (wide - wide.mean(1, True))[:, 25:].square().sum(1)))
    shared = cut_gates.cut_gates(half, GELU, cut, NUM, lambda own: own + next(others))
    assert_near(shared, out[:, :25])


def test_no_tokens_are_no_work(device: torch.device) -> None:
    x, weight = torch.empty(0, 8, device=device), torch.ones(8, device=device)
    assert altup.begin(x, x).shape == (0, 2, 8)
    assert cut_gates.cut_gates(x, GELU, 1.0, 4).shape == (0, 4)
    assert layer_inputs.layer_inputs(x, x, weight, EPS).shape == (0, 8)
    assert normed_sum.normed_sum((x, weight), scaling=Scaling.RMS, eps=EPS).shape == (0, 8)
