"""Latent attention on GPUs: the C++ executor's logits, whatever the batch, in graphs too."""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gpu_tests import first_of
from random_decoders import LATENTS, MIXTURES, NUM_PAGES, batch, cpu, random_weights, with_latents
from recorded_graphs import RecordedGraphs, device_tensors

from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Buckets, Sizes
from headrace.engine_proc.worker.cuda.graphs import CudaGraphs
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, LatentAttentionSpec

SMALL = LatentAttentionSpec(query_rank=24, rank=16, nope_dim=12, rope_dim=16, value_dim=16)
SIZES = {"hidden_size": 32, "intermediate_size": 40}
TINY = {
    name: dataclasses.replace(spec, **SIZES, layers=spec.layers[:1])
    for name, spec in {
        "deepseek": with_latents(
            dataclasses.replace(LATENTS["deepseek"], num_heads=3), SMALL, window=None
        ),
        "plain queries, biases": with_latents(
            dataclasses.replace(LATENTS["deepseek"], num_heads=5, output_bias=True),
            dataclasses.replace(SMALL, query_rank=None, bias=True, nope_dim=9),
        ),
        "parallel, no RoPE": with_latents(
            dataclasses.replace(LATENTS["parallel, wide values, no RoPE"], num_heads=2),
            SMALL,
            rope=None,
        ),
    }.items()
}
MIXTURE = MIXTURES["deepseek"].layers[1].mixture
TINY["deepseek"] = dataclasses.replace(
    TINY["deepseek"],
    layers=tuple(
        dataclasses.replace(TINY["deepseek"].layers[0], mixture=own) for own in (None, MIXTURE)
    ),
)


def make(spec: DecoderSpec, device: torch.device, **options: Any) -> CudaExecutor:
    return CudaExecutor(
        spec,
        random_weights(spec),
        num_pages=NUM_PAGES,
        page_tokens=16,
        device=device,
        tiling=Tiling(rows=16, keys=16, split_keys=16, enough_programs=6),
        largest=Sizes(64, 4, 24),
        max_model_len=304,
        **({"dtype": torch.float32} | options),
    )


@pytest.mark.parametrize("name", first_of(2, list(TINY)))
def test_logits_are_those_of_the_cpp_executor(name: str, device: torch.device) -> None:
    ours, theirs = make(TINY[name], device), cpu(TINY[name])
    for parts in ([(0, 0, 14), (2, 0, 3)], [(2, 3, 4), (0, 14, 18)]):
        logits, expected = ours.forward(batch(parts)), theirs.forward(batch(parts))
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))


def test_batch_mates_change_no_bit_of_latents(device: torch.device) -> None:
    spec, options = TINY["deepseek"], {"dtype": torch.bfloat16}
    spec = dataclasses.replace(spec, layers=spec.layers[:1])
    whole = make(spec, device, **options).forward(batch([(0, 0, 19)]))
    mixed = make(spec, device, **options)
    first = mixed.forward(batch([(2, 0, 4), (0, 0, 15)]))
    np.testing.assert_array_equal(first[4:19], whole[:15])
    second = mixed.forward(batch([(0, 15, 19), (2, 4, 5)]))
    np.testing.assert_array_equal(second[:4], whole[15:])


def test_latents_in_graphs_are_those_without(device: torch.device) -> None:
    spec = TINY["parallel, no RoPE"]
    graphs, eager = make(spec, device), make(spec, device)
    stand_in = partial(RecordedGraphs, list(device_tensors(graphs)))
    graphs.capture(Buckets([Sizes(4, 4, 4)]), stand_in if device.type == "cpu" else CudaGraphs)
    for step in (batch([(0, 0, 2), (2, 0, 1)]), batch([(2, 1, 2), (0, 2, 3)])):
        np.testing.assert_array_equal(graphs.forward(step), eager.forward(step))


def test_pages_hold_one_latent_per_token(device: torch.device) -> None:
    spec = TINY["deepseek"]
    assert make(spec, device).page_bytes == 2 * 16 * (16 + 16) * 4
    narrow = make(spec, device, kv_dtype=torch.float8_e4m3fn)
    assert narrow.page_bytes == 2 * 16 * (16 + 16)
    logits, exact = (own.forward(batch([(0, 0, 9)])) for own in (narrow, cpu(spec)))
    for row, expected in zip(logits, exact, strict=True):
        assert np.corrcoef(row, expected)[0, 1] > 0.9
