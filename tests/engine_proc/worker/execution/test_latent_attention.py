"""Latent attention on the CPU: right against torch, and the same bits whatever the chunks."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from drawn_steps import assert_bits_alone, drawn_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from random_decoders import (
    BLOCKS,
    LATENTS,
    LENGTH,
    NUM_PAGES,
    SPEC,
    WHOLE_BLOCKS,
    batch,
    cpu,
    random_weights,
    with_latents,
)

from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cache_sizes import page_bytes
from headrace.engine_proc.worker.execution.cpu_executor import Isa, KVDtype, UnsupportedSpec
from headrace.engine_proc.worker.execution.memory_check import step_bytes
from headrace.engine_proc.worker.models.specs.decoder_spec import LatentAttentionSpec, LayerSpec
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor

ARITHMETIC: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"weight_dtype": "bfloat16", "kv_dtype": "bfloat16", "rounds_activations": True},
    "int8": {"weight_dtype": "int8"},
}
DEEPSEEK = LATENTS["deepseek"]
SIZES = {"query_rank": 256, "rank": 256, "nope_dim": 256, "rope_dim": 16, "value_dim": 256}


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
@pytest.mark.parametrize("name", LATENTS)
def test_every_field_of_a_latent_means_what_torch_says(name: str, isa: Isa) -> None:
    spec = LATENTS[name]
    weights = random_weights(spec)
    try:
        executor = cpu(spec, weights, isa=isa)
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    reference = TorchExecutor(spec, weights, num_pages=NUM_PAGES, page_tokens=16)
    for parts in ([(0, 0, 90)], [(1, 0, 2), (0, 90, 91)], [(1, 2, LENGTH)]):
        expected = reference.forward(batch(parts))
        np.testing.assert_allclose(executor.forward(batch(parts)), expected, atol=2e-4)


@settings(max_examples=25)
@given(data=st.data())
def test_chunks_and_batch_mates_change_no_bit_of_a_latent(data: st.DataObject) -> None:
    """Draws batches, chunks and thread counts."""
    spec = LATENTS[data.draw(st.sampled_from(sorted(LATENTS)))]
    options = ARITHMETIC[data.draw(st.sampled_from(sorted(ARITHMETIC)))]
    length = data.draw(st.integers(1, LENGTH))
    alone = cpu(spec, threads=1, **options).forward(batch([(0, 0, length)]))
    executor = cpu(spec, threads=data.draw(st.integers(1, 4)), **options)
    for parts in drawn_steps(data, length, LENGTH):
        logits = executor.forward(batch(parts))
        assert_bits_alone(parts, logits, alone)


def test_a_prompt_of_latents_cut_anywhere_has_the_same_bits() -> None:
    executor = cpu(DEEPSEEK)
    whole = executor.forward(batch([(0, 0, 40)]))
    for cut in range(1, 40):
        parts = [executor.forward(batch([part])) for part in ((0, 0, cut), (0, cut, 40))]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("format", [Format.BF16, *BLOCKS])
def test_packed_matrices_of_heads_have_the_bits_of_decoded_ones(format: Format) -> None:
    spec = with_latents(WHOLE_BLOCKS, LatentAttentionSpec(**SIZES))
    weights = random_weights(spec, format)
    packed, decoded = cpu(spec, weights), cpu(spec, weights, weight_dtype="float32")
    for parts in ([(0, 0, 50)], [(0, 50, 51), (1, 0, 3)]):
        np.testing.assert_array_equal(packed.forward(batch(parts)), decoded.forward(batch(parts)))


def test_bf16_latents_are_rounded_alone() -> None:
    exact = cpu(DEEPSEEK, rounds_activations=False).forward(batch([(0, 0, 80)]))
    rounded = cpu(DEEPSEEK, kv_dtype="bfloat16").forward(batch([(0, 0, 80)]))
    np.testing.assert_allclose(rounded, exact, atol=0.05)
    assert (rounded != exact).any()


def test_pages_hold_a_latent_once() -> None:
    numbers = 2 * 32 * (64 + 16)  # of two layers and 32 tokens
    assert page_bytes(DEEPSEEK, 32, KVDtype.BFLOAT16) == 2 * numbers
    assert page_bytes(DEEPSEEK, 32, KVDtype.FLOAT32) == 4 * numbers


def test_steps_of_latents_take_what_is_said() -> None:
    """Beside a plain head's, room for each head's latent: as it is, rounded and absorbed."""
    spec = with_latents(SPEC, LatentAttentionSpec(**SIZES))
    latent = spec.latent
    assert latent is not None
    narrow = with_latents(SPEC, dataclasses.replace(latent, nope_dim=16, rank=16))
    more = step_bytes(spec, 10) - step_bytes(narrow, 10)
    assert more >= 4 * 10 * spec.num_heads * 3 * (256 - 16)


def test_latents_beside_keys_and_values_are_refused() -> None:
    mixed = dataclasses.replace(DEEPSEEK, layers=(DEEPSEEK.layers[0], LayerSpec()))
    with pytest.raises(UnsupportedSpec, match="latents, or keys and values"):
        cpu(mixed)


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        ({"rank": 40}, "kv_lora_rank of 40, which is not a multiple of 16"),
        ({"rope_dim": 8}, "qk_rope_head_dim of 8"),
        ({"value_dim": 24}, "v_head_dim of 24"),
        ({"rank": 1024}, "latent of 1040 numbers; the most is 1024"),
    ],
)
def test_latents_of_other_sizes_are_refused(size: dict[str, int], complaint: str) -> None:
    latent = DEEPSEEK.latent
    assert latent is not None
    with pytest.raises(UnsupportedSpec, match=complaint):
        cpu(with_latents(DEEPSEEK, dataclasses.replace(latent, **size)))
