"""Layers with a state on the CPU: right against torch, and the same bits whatever the chunks."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from drawn_steps import assert_bits_alone, drawn_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from random_decoders import (
    BLOCKS,
    DELTA_NET,
    HYBRIDS,
    LENGTH,
    NUM_PAGES,
    NUM_STATES,
    WHOLE_BLOCKS,
    batch,
    cpu,
    random_weights,
    with_states,
)

from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cache_sizes import page_bytes, state_bytes
from headrace.engine_proc.worker.execution.cpu_executor import (
    CpuExecutor,
    Isa,
    KVDtype,
    UnsupportedSpec,
)
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    ShortConvSpec,
)
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor

ARITHMETIC: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"weight_dtype": "bfloat16", "kv_dtype": "bfloat16", "rounds_activations": True},
    "int8": {"weight_dtype": "int8"},
}
LFM2 = HYBRIDS["lfm2"]


def make(spec: DecoderSpec, **options: Any) -> CpuExecutor:
    return cpu(spec, num_states=NUM_STATES, **options)


def step_of(*parts: tuple[int, int, int]) -> Batch:
    return with_states(batch(parts))


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
@pytest.mark.parametrize("name", HYBRIDS)
def test_every_field_of_a_hybrid_means_what_torch_says(name: str, isa: Isa) -> None:
    spec = HYBRIDS[name]
    weights = random_weights(spec)
    try:
        executor = make(spec, weights=weights, isa=isa)
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    reference = TorchExecutor(
        spec, weights, num_pages=NUM_PAGES, page_tokens=16, num_states=NUM_STATES
    )
    for step in (step_of((0, 0, 90)), step_of((1, 0, 2), (0, 90, 91)), step_of((1, 2, LENGTH))):
        expected = reference.forward(step)
        np.testing.assert_allclose(executor.forward(step), expected, atol=2e-4)


@settings(max_examples=25)
@given(data=st.data())
def test_chunks_and_batch_mates_change_no_bit_of_a_hybrid(data: st.DataObject) -> None:
    """Draws batches, chunks and thread counts."""
    spec = HYBRIDS[data.draw(st.sampled_from(sorted(HYBRIDS)))]
    options = ARITHMETIC[data.draw(st.sampled_from(sorted(ARITHMETIC)))]
    length = data.draw(st.integers(1, 120))
    alone = make(spec, threads=1, **options).forward(step_of((0, 0, length)))
    executor = make(spec, threads=data.draw(st.integers(1, 4)), **options)
    for parts in drawn_steps(data, length, LENGTH):
        step = step_of(*parts)
        logits = executor.forward(step)
        np.testing.assert_array_equal(executor.forward(step), logits, "run again")
        assert_bits_alone(parts, logits, alone)


def test_a_prompt_cut_anywhere_has_the_bits_of_a_whole_one() -> None:
    executor = make(LFM2)
    whole = executor.forward(step_of((0, 0, 40)))
    for cut in range(1, 40):
        parts = [executor.forward(step_of(part)) for part in ((0, 0, cut), (0, cut, 40))]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("format", [Format.BF16, *BLOCKS])
def test_packed_convolutions_have_the_bits_of_decoded_ones(format: Format) -> None:
    conv = LayerSpec(mixer=ShortConvSpec(channels=256, kernel_size=3))
    spec = dataclasses.replace(WHOLE_BLOCKS, layers=(conv, LayerSpec()))
    weights = random_weights(spec, format)
    packed = make(spec, weights=weights)
    decoded = make(spec, weights=weights, weight_dtype="float32")
    for step in (step_of((0, 0, 50)), step_of((0, 50, 51), (1, 0, 3))):
        np.testing.assert_array_equal(packed.forward(step), decoded.forward(step))


@pytest.mark.parametrize("format", [Format.BF16, *BLOCKS])
def test_packed_delta_nets_have_the_bits_of_decoded_ones(format: Format) -> None:
    delta = GatedDeltaNetSpec(
        num_key_heads=2, num_value_heads=4, key_dim=24, value_dim=64, kernel_size=4
    )
    layers = (LayerSpec(mixer=delta), LayerSpec())
    spec = dataclasses.replace(WHOLE_BLOCKS, layers=layers, attention_gate=True)
    weights = random_weights(spec, format)
    packed = make(spec, weights=weights)
    decoded = make(spec, weights=weights, weight_dtype="float32")
    for step in (step_of((0, 0, 50)), step_of((0, 50, 51), (1, 0, 3))):
        np.testing.assert_array_equal(packed.forward(step), decoded.forward(step))


def logits_of(executor: CpuExecutor, **changes: Any) -> Floats:
    step = step_of((0, 0, 5))
    executor.forward(step)
    return executor.forward(dataclasses.replace(step_of((0, 5, 9)), **changes))


@pytest.mark.parametrize("slots", [(-1, 0), (0, 0), (0, NUM_STATES), (NUM_STATES, 0), (0, -1)])
def test_slots_beyond_their_range_are_refused(slots: tuple[int, int]) -> None:
    """So is a text that goes on without a state, and a slot that is read and written."""
    columns = {
        name: np.full(4, slot, np.int32)
        for name, slot in zip(("state_in", "state_out"), slots, strict=True)
    }
    with pytest.raises(ValueError, match="state"):
        logits_of(make(LFM2), **columns)


def test_a_step_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="state"):
        logits_of(make(LFM2), state_in=None, state_out=None)


def test_layers_without_attention_take_no_pages() -> None:
    attention = dataclasses.replace(LFM2, layers=(LayerSpec(),))
    assert page_bytes(LFM2, 32, KVDtype.BFLOAT16) == page_bytes(attention, 32, KVDtype.BFLOAT16)
    assert state_bytes(LFM2) == 4 * 96 * (2 + 4)
    delta = dataclasses.replace(LFM2, layers=(LayerSpec(), LayerSpec(mixer=DELTA_NET)))
    assert state_bytes(delta) == 4 * (3 * (2 * 4 * 16 + 12 * 40) + 12 * 16 * 40)


@pytest.mark.parametrize("kernel_size", [1, 17])
def test_kernels_of_other_sizes_are_refused(kernel_size: int) -> None:
    conv = LayerSpec(mixer=ShortConvSpec(channels=96, kernel_size=kernel_size))
    with pytest.raises(UnsupportedSpec, match=f"over {kernel_size} tokens"):
        make(dataclasses.replace(LFM2, layers=(conv, LayerSpec())))
