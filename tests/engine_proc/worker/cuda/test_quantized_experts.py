"""Mixtures whose experts are held in fewer bits have the logits of what these stand for."""

import dataclasses
import logging

import numpy as np
import pytest
import torch
from gpu_tests import first_of
from quantized_experts import int4, quantized
from random_decoders import MIXTURES, NUM_PAGES, batch, cpu

from headrace.engine_proc.worker.checkpoints.int4_weight import Int4Weight
from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import ExpertFormat

SIZES = {"hidden_size": 160, "num_heads": 2, "num_kv_heads": 1}
SIZES |= {"layers": MIXTURES["qwen2_moe"].layers[:1]}
SPEC = dataclasses.replace(MIXTURES["qwen2_moe"], **SIZES)
MIXTURE = dataclasses.replace(
    SPEC.layers[0].mixture,
    intermediate_size=96,
    num_experts=5,
    experts_per_token=2,  # type: ignore[type-var]
)
SPEC = dataclasses.replace(SPEC, layers=(dataclasses.replace(SPEC.layers[0], mixture=MIXTURE),))
HELD = {"int4": ExpertFormat.INT4, "mxfp4": ExpertFormat.MXFP4}
PARTS = [(0, 0, 7), (2, 0, 3)]


def make(
    weights: Weights, device: torch.device, dtype: torch.dtype = torch.float32, **options: str
) -> CudaExecutor:
    return CudaExecutor(
        SPEC,
        weights,
        num_pages=NUM_PAGES,
        page_tokens=16,
        device=device,
        dtype=dtype,
        tiling=Tiling(rows=16, keys=16, split_keys=16, enough_programs=6),
        largest=Sizes(64, 4, 24),
        max_model_len=304,
        **options,
    )


@pytest.mark.parametrize("name", first_of(3, [*HELD, "fp8 by block", "fp8 by tensor"]))
def test_logits_are_those_of_what_experts_stand_for(name: str, device: torch.device) -> None:
    weights = quantized(SPEC, name)
    ours = make(weights, device)
    for experts in ours.loaded.experts.values():
        assert experts.format == HELD.get(name, ExpertFormat.FP8)
        assert experts.numbers.element_size() == 1
    logits, expected = ours.forward(batch(PARTS)), cpu(SPEC, weights).forward(batch(PARTS))
    if name in HELD:
        np.testing.assert_allclose(logits, expected, atol=1e-4)
    else:  # rows are rounded, too
        errors = np.abs(logits - expected).max(1) / expected.std(1)
        assert errors.max() < 0.25, errors
        assert np.median(errors) < 0.1, errors


def test_batch_mates_change_no_bit(device: torch.device) -> None:
    weights = quantized(SPEC, "fp8 by block")
    alone, mixed = (make(weights, device, torch.bfloat16) for _ in range(2))
    whole = alone.forward(batch([(0, 0, 9)]))
    first = mixed.forward(batch([(2, 0, 4), (0, 0, 8), (3, 0, 7)]))
    np.testing.assert_array_equal(first[4:12], whole[:8])
    np.testing.assert_array_equal(mixed.forward(batch([(0, 8, 9)])), whole[8:])


def test_fp8_rounds_experts_too(device: torch.device) -> None:
    weights = quantized(SPEC, "int4")
    plain = {name: weight.stored() for name, weight in weights.items()}
    ours = make(plain, device, quantization="fp8")
    assert {own.format for own in ours.loaded.experts.values()} == {ExpertFormat.FP8}
    exact = cpu(SPEC, weights).forward(batch(PARTS))
    rows = zip(ours.forward(batch(PARTS)), exact, strict=True)
    alike = [np.corrcoef(row, expected)[0, 1] for row, expected in rows]
    assert np.median(alike) > 0.95
    assert min(alike) > 0.9


def test_experts_that_no_kernel_takes_are_decoded(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    weights = dict(quantized(SPEC, "int4"))
    for expert in range(MIXTURE.num_experts):  # groups of 16 columns
        weights[f"layers.0.experts.{expert}.down"] = int4((160, 96), 16)
    order = np.roll(np.arange(160, dtype=np.int32) // 32, 5)
    for name in [name for name in weights if name.endswith((".gate", ".up"))]:
        if isinstance(own := weights[name], Int4Weight):
            weights[name] = Int4Weight.of(dataclasses.replace(own.matrix, group_of=order))
    with caplog.at_level(logging.WARNING):
        ours = make(weights, device)
    assert {own.format for own in ours.loaded.experts.values()} == {ExpertFormat.DENSE}
    (line,) = caplog.messages
    assert line.startswith("matrices of experts are decoded to torch.float32, since no kernel")
    assert line.endswith(": layers.0.experts.gate_up, layers.0.experts.down")
    expected = cpu(SPEC, weights).forward(batch(PARTS))
    np.testing.assert_allclose(ours.forward(batch(PARTS)), expected, atol=1e-4)
