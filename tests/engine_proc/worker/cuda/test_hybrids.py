"""Layers with states on GPUs: the C++ executor's logits, whatever the batch, in graphs too."""

import dataclasses
from functools import partial
from typing import Any

import family_table
import numpy as np
import pytest
import torch
from random_decoders import (
    HYBRIDS,
    NUM_PAGES,
    NUM_STATES,
    SPEC,
    batch,
    cpu,
    random_weights,
    with_images,
    with_states,
)
from recorded_graphs import RecordedGraphs, device_tensors

from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Buckets, Sizes
from headrace.engine_proc.worker.cuda.graphs import CudaGraphs
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
    MixtureSpec,
    NormPlacement,
    ShortConvSpec,
)

SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "num_kv_heads": 1}
CONV = ShortConvSpec(channels=32, kernel_size=3)
DELTA = GatedDeltaNetSpec(
    num_key_heads=2, num_value_heads=4, key_dim=12, value_dim=8, kernel_size=4
)
MAMBA2 = Mamba2Spec(
    num_heads=4, head_dim=8, state_size=9, num_groups=2, kernel_size=4, norm_size=32
)
ODD_MAMBA2 = dataclasses.replace(
    MAMBA2, kernel_size=2, conv_bias=False, input_bias=True, output_bias=True, norm_size=0
)
MAMBA = MambaSpec(channels=24, state_size=5, rank=3, kernel_size=3, norms=True)
EXPERTS = MixtureSpec(num_experts=3, experts_per_token=2, intermediate_size=24)
TINY = {
    "lfm2": dataclasses.replace(
        HYBRIDS["lfm2"], **SIZES, layers=(LayerSpec(mixer=CONV), LayerSpec())
    ),
    "qwen3_next": dataclasses.replace(
        HYBRIDS["qwen3_next"],
        **SIZES,
        placement=NormPlacement.PRE,
        layers=(LayerSpec(mixer=DELTA), LayerSpec()),
    ),
    "kimi": dataclasses.replace(
        HYBRIDS["kimi"],
        **SIZES,
        layers=(LayerSpec(mixer=dataclasses.replace(DELTA, gate_rank=5)), LayerSpec()),
    ),
    "delta nets as llama.cpp orders them": dataclasses.replace(
        SPEC,
        **SIZES,
        layers=(LayerSpec(mixer=dataclasses.replace(DELTA, is_tiled=True)), LayerSpec()),
    ),
    "granitemoehybrid": dataclasses.replace(
        SPEC,
        **SIZES,
        residual_multiplier=0.6,
        layers=(LayerSpec(mixer=MAMBA2, mixture=EXPERTS), LayerSpec(rope=None)),
    ),
    "nemotron_h": dataclasses.replace(
        HYBRIDS["mamba2 of odd sizes, halves of layers"],
        **SIZES,
        layers=(
            LayerSpec(has_mixer=False),
            LayerSpec(mixer=ODD_MAMBA2, has_mlp=False),
            LayerSpec(has_mlp=False),
        ),
    ),
    "falcon_h1": dataclasses.replace(
        HYBRIDS["mamba2 beside attention"],
        **SIZES,
        layers=(
            LayerSpec(
                mixer=dataclasses.replace(
                    MAMBA2,
                    norm_size=16,
                    norm_before_gate=True,
                    multipliers=(0.7, 1.5, 0.9, 1.2, 0.8),
                ),
                attention_beside=True,
                mixer_multiplier=0.7,
                attention_multiplier=1.3,
            ),
        ),
    ),
    "jamba": dataclasses.replace(
        SPEC,
        **SIZES,
        layers=(LayerSpec(mixer=MAMBA, mixture=EXPERTS), LayerSpec(rope=None)),
    ),
    "mamba of odd sizes, with biases": dataclasses.replace(
        HYBRIDS["mamba of odd sizes, with biases"], num_heads=2, num_kv_heads=1
    ),
    "convolutions with biases, parallel": dataclasses.replace(
        HYBRIDS["odd sizes, biases, parallel"], num_heads=2, num_kv_heads=1
    ),
}


FEW = ("qwen3_next", "granitemoehybrid", "jamba")
ALL = dataclasses.replace(  # mixers with states, and no other layer
    SPEC,
    **SIZES,
    layers=tuple(LayerSpec(mixer=own, has_mlp=False) for own in (CONV, DELTA, MAMBA2, MAMBA)),
)


def make(spec: DecoderSpec, device: torch.device, **options: Any) -> CudaExecutor:
    return CudaExecutor(
        spec,
        random_weights(spec),
        num_pages=NUM_PAGES,
        num_states=NUM_STATES,
        page_tokens=16,
        device=device,
        tiling=Tiling(rows=16, keys=16, split_keys=16, enough_programs=6),
        largest=Sizes(64, 4, 24),
        max_model_len=304,
        **({"dtype": torch.float32} | options),
    )


def step_of(*parts: tuple[int, int, int]) -> Batch:
    return with_states(batch(parts))


@pytest.mark.parametrize("name", TINY if family_table.WRITES else FEW)
def test_hybrids_have_the_logits_of_the_cpp_executor(name: str, device: torch.device) -> None:
    """Of a sequence's second chunk, too, which passes the end of a block of tokens."""
    ours, theirs = make(TINY[name], device), cpu(TINY[name], num_states=NUM_STATES)
    for parts in ([(0, 0, 9), (2, 0, 3)], [(2, 3, 4), (0, 9, 18), (3, 0, 1)]):
        logits, expected = (own.forward(step_of(*parts)) for own in (ours, theirs))
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))


def test_hybrids_take_images_as_in_the_cpp_executor(device: torch.device) -> None:
    """Rows of images come in, and positions in three parts beside slots."""
    (rope,) = SPEC.ropes
    turned = dataclasses.replace(rope, axes=tuple(i % 3 for i in range(len(rope.inv_freq))))
    spec = dataclasses.replace(ALL, ropes=(turned,), layers=(ALL.layers[1], LayerSpec()))
    ours, theirs = make(spec, device), cpu(spec, num_states=NUM_STATES)
    for parts in ([(0, 0, 7)], [(0, 7, 9), (2, 0, 1)]):
        step = with_images(step_of(*parts), spec, whole=False)
        logits, expected = ours.forward(step), theirs.forward(step)
        np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_batch_mates_and_cuts_change_no_bit_of_a_hybrid(device: torch.device) -> None:
    whole = make(ALL, device, dtype=torch.bfloat16).forward(step_of((0, 0, 7)))
    mixed = make(ALL, device, dtype=torch.bfloat16)
    first = mixed.forward(step_of((2, 0, 2), (0, 0, 4)))
    np.testing.assert_array_equal(first[2:], whole[:4])
    again = step_of((0, 4, 6), (2, 2, 3))
    for _ in range(2):  # a step may be run again
        np.testing.assert_array_equal(mixed.forward(again)[:2], whole[4:6])
    np.testing.assert_array_equal(mixed.forward(step_of((0, 6, 7))), whole[6:])


def test_hybrids_in_graphs_have_the_logits_without(device: torch.device) -> None:
    graphs, eager = make(ALL, device), make(ALL, device)
    stand_in = partial(RecordedGraphs, list(device_tensors(graphs)))
    graphs.capture(Buckets([Sizes(4, 4, 4)]), stand_in if device.type == "cpu" else CudaGraphs)
    for step in (step_of((0, 0, 2), (2, 0, 1)), step_of((2, 1, 2), (0, 2, 3))):
        np.testing.assert_array_equal(graphs.forward(step), eager.forward(step))
    assert torch.equal(graphs.states, eager.states)


def test_drafts_change_no_state_on_gpus(device: torch.device) -> None:
    """The written state ends before them, and the next step computes them again."""
    executor = make(ALL, device)
    step = step_of((0, 0, 5))
    whole = executor.forward(step)
    ends = dataclasses.replace(
        step, state_ends=np.full(4, 3, np.int32), state_out=np.full(4, 3, np.int32)
    )
    np.testing.assert_array_equal(executor.forward(ends), whole)
    np.testing.assert_array_equal(executor.forward(step_of((0, 3, 5))), whole[3:])


def test_layers_with_states_take_no_pages_on_gpus(device: torch.device) -> None:
    hybrid = make(TINY["lfm2"], device)
    attention = dataclasses.replace(TINY["lfm2"], layers=(LayerSpec(),))
    assert hybrid.page_bytes == make(attention, device).page_bytes
    assert hybrid.states.shape == (NUM_STATES, 2 * 32)
    assert SPEC.state_numbers == 0


def test_slots_have_rows_of_a_block_beside_the_state(device: torch.device) -> None:
    """Of 15 tokens decays, keys and what they add, in the type of products."""
    delta, mamba2, kimi = (TINY[name] for name in ("qwen3_next", "granitemoehybrid", "kimi"))
    for dtype, delta_bytes, mamba2_bytes in (
        (torch.bfloat16, 256 + 768 + 960, 256 + 576 + 960),
        (torch.float32, 256 + 1472 + 1920, 256 + 1088 + 1920),
    ):
        for spec, rows in ((delta, delta_bytes), (mamba2, mamba2_bytes), (kimi, 0)):
            assert make(spec, device, dtype=dtype).state_bytes == 4 * spec.state_numbers + rows
