"""Mixtures of experts on GPUs: the C++ executor's logits, whatever the batch, in graphs too."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from gpu_tests import first_of
from random_decoders import MIXTURES, NUM_PAGES, SPECS, batch, cpu, random_weights, with_mixture
from recorded_graphs import RecordedGraphs, device_tensors

from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Buckets, Sizes
from headrace.engine_proc.worker.cuda.graphs import CudaGraphs
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    DecoderSpec,
    RouterScore,
)

TILING = Tiling(rows=16, keys=16, split_keys=16, enough_programs=6)
SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "num_kv_heads": 1}
TINY = {
    name: dataclasses.replace(spec, **SIZES, layers=spec.layers[:2])
    for name, spec in MIXTURES.items()
}
UNGATED = "without gates, biases of the router beside a gate of the shared MLP"
TINY[UNGATED] = with_mixture(
    dataclasses.replace(
        SPECS["llama"], **SIZES, activation=Activation.RELU2, gated_mlp=False, mlp_bias=True
    ),
    score=RouterScore.SIGMOID,
    selection_bias=True,
    router_bias=True,
    expert_bias=True,
    shared_intermediate_size=48,
    shared_gate=True,
)


def make(
    spec: DecoderSpec, device: torch.device, dtype: torch.dtype = torch.float32
) -> CudaExecutor:
    return CudaExecutor(
        spec,
        random_weights(spec),
        num_pages=NUM_PAGES,
        page_tokens=16,
        device=device,
        dtype=dtype,
        tiling=TILING,
        largest=Sizes(64, 4, 24),
        max_model_len=304,
    )


@pytest.mark.parametrize(
    "name",
    first_of(5, [*dict.fromkeys(("gpt_oss", "deepseek", "llama4", "phimoe", UNGATED, *TINY))]),
)
def test_mixtures_have_the_logits_of_the_cpp_executor(name: str, device: torch.device) -> None:
    ours, theirs = make(TINY[name], device), cpu(TINY[name])
    for parts in ([(0, 0, 14), (2, 0, 3)], [(2, 3, 4), (0, 14, 18), (3, 0, 3)]):
        logits, expected = ours.forward(batch(parts)), theirs.forward(batch(parts))
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))


@pytest.mark.parametrize(
    ("name", "dtype"), first_of(1, [(UNGATED, torch.bfloat16), ("deepseek", torch.float32)])
)
def test_batch_mates_change_no_bit_of_a_mixture(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    whole = make(TINY[name], device, dtype).forward(batch([(0, 0, 14)]))
    mixed = make(TINY[name], device, dtype)
    first = mixed.forward(batch([(2, 0, 3), (0, 0, 11), (3, 0, 4)]))  # in two tiles
    np.testing.assert_array_equal(first[3:14], whole[:11])
    second = mixed.forward(batch([(3, 4, 5), (0, 11, 13), (2, 3, 4)]))
    np.testing.assert_array_equal(second[1:3], whole[11:13])
    np.testing.assert_array_equal(mixed.forward(batch([(0, 13, 14)])), whole[13:])


def test_mixtures_in_graphs_are_those_without(device: torch.device) -> None:
    spec = dataclasses.replace(TINY["qwen2_moe"], layers=TINY["qwen2_moe"].layers[:1])
    graphs, eager = make(spec, device), make(spec, device)
    stand_in = partial(RecordedGraphs, list(device_tensors(graphs)))
    open_maker = stand_in if device.type == "cpu" else CudaGraphs
    graphs.capture(Buckets([Sizes(4, 4, 4)]), open_maker)
    steps = (
        batch([(0, 0, 2), (2, 0, 1), (1, 0, 1)]),
        batch([(2, 1, 2), (0, 2, 3), (1, 1, 2)]),
        batch([(1, 2, 3)]),
    )
    for step in steps:
        np.testing.assert_array_equal(graphs.forward(step), eager.forward(step))


def test_16_bit_mixtures_are_near_the_cpp_executor(device: torch.device) -> None:
    spec = with_mixture(dataclasses.replace(SPECS["llama"], **SIZES), experts_per_token=12)
    logits = make(spec, device, torch.bfloat16).forward(batch([(0, 0, 9)]))
    np.testing.assert_allclose(logits, cpu(spec).forward(batch([(0, 0, 9)])), atol=0.15)
