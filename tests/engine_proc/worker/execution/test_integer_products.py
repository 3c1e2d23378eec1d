"""Products of quantized weights and rounded activations: integers, then scales."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from random_decoders import BLOCKS, SPEC, WHOLE_BLOCKS, batch, cpu, random_weights, stored

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor
from headrace.engine_proc.worker.execution.cpu_executor import Isa, UnsupportedSpec

STEPS = np.float32(127 * 128)  # of the largest activation of a group, in 16 bits
# Of weights in steps of their unit. A sum of 256 columns, times it, fits 32 bits.
LARGEST_WEIGHTS = {
    Format.Q2_K: 3 * 15,
    Format.Q3_K: 4 * 32,
    Format.Q4_K: 15 * 63,
    Format.Q5_K: 31 * 63,
    Format.Q6_K: 32 * 128,
    Format.IQ4_XS: 127 * 32,
}


def rounded(x: npt.NDArray[np.float32], format: Format) -> npt.NDArray[np.float64]:
    """Return groups of activations, rounded beside weights of a format."""
    most_sum = (2**31 - 1) // LARGEST_WEIGHTS.get(format, 1)
    largest = np.abs(x).max(-1, keepdims=True)

    def integers(steps: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        inverse = np.divide(steps, largest, out=np.zeros_like(largest), where=largest > 0)
        return np.rint(x * inverse)

    steps = np.full_like(largest, STEPS)
    sums = np.abs(integers(steps)).sum(-1, keepdims=True).astype("i8")
    fewer = int(STEPS) * (most_sum - x.shape[-1]) // (sums + x.shape[-1])
    steps = np.where(sums > most_sum, fewer, STEPS).astype("f4")
    return integers(steps) * (largest / steps).astype("f8")


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
@pytest.mark.parametrize("format", BLOCKS)
def test_blocks_multiply_integers_and_scales(format: Format, isa: Isa) -> None:
    """The very numbers, from a model whose logits are a product with nothing before it."""
    hidden_size = 512 if BLOCKS[format][0] == 256 else 96
    spec = dataclasses.replace(SPEC, layers=(), tied_head=False, hidden_size=hidden_size)
    weights = random_weights(spec, format)
    step = batch([(0, 0, 87)])
    try:
        executor = cpu(spec, weights, rounds_activations=True, isa=isa)
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    x = executor.embed(step).reshape(87, -1, BLOCKS[format][0])
    expected = rounded(x, format).reshape(87, -1) @ weights["head"].to_float32().T.astype("f8")
    logits = executor.forward(step)
    np.testing.assert_allclose(logits, expected, atol=2e-6 * np.abs(expected).max())
    # Every tile's height; a whole one and a few rows.
    cuts = [0, 1, 3, 6, 10, 15, 21, 28, 36, 46, 57, 75, 87]
    parts = [executor.forward(batch([(0, a, b)])) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), logits)


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
@pytest.mark.parametrize("format", [f for f in BLOCKS if BLOCKS[f][0] == 256])
def test_the_largest_sums_of_units_fit_their_integers(format: Format, isa: Isa) -> None:
    """Codes and scales as far from zero as bytes have them, and equal activations."""
    spec = dataclasses.replace(SPEC, layers=(), tied_head=False, hidden_size=512)
    is_signed = format in (Format.Q3_K, Format.Q6_K, Format.IQ4_XS)
    _, num_bytes, halves = BLOCKS[format]
    blocks = np.full((2 * spec.vocab_size, num_bytes), 0 if is_signed else 255, np.uint8)
    if format == Format.Q6_K:
        blocks[:, 192:208] = 128  # scales
    for place, half in zip(halves, (2**-12, 0), strict=False):  # no minimum
        blocks[:, place : place + 2] = np.array([half], "<f2").view("u1")
    weights = dict(random_weights(spec))
    weights["embed"] = stored(np.ones((spec.vocab_size, 512), np.float32))
    weights["norm"] = stored(np.ones(512, np.float32))
    weights["head"] = StoredTensor(format, (spec.vocab_size, 512), blocks.reshape(-1))
    try:
        executor = cpu(spec, weights, rounds_activations=True, isa=isa)
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    step = batch([(0, 0, 30)])
    expected = executor.embed(step) @ weights["head"].to_float32().T.astype("f8")
    np.testing.assert_allclose(executor.forward(step), expected, rtol=1e-5)


def test_one_product_may_have_scales_of_groups_and_of_units() -> None:
    weights = dict(random_weights(WHOLE_BLOCKS, Format.Q4_0))
    others = random_weights(WHOLE_BLOCKS, Format.Q6_K)
    weights |= {name: others[name] for name in others if name.endswith((".k", ".up", ".down"))}
    logits = cpu(WHOLE_BLOCKS, weights, rounds_activations=True).forward(batch([(0, 0, 60)]))
    exact = cpu(WHOLE_BLOCKS, weights).forward(batch([(0, 0, 60)]))
    assert 0 < np.linalg.norm(logits - exact) / np.linalg.norm(exact) < 0.001


@pytest.mark.parametrize("name", ["int8", Format.Q4_K, Format.Q2_K, Format.Q8_0])
@pytest.mark.parametrize("num_rows", [8, 16, 23, 65, 72, 80, 299])
def test_bands_of_rows_give_the_bits_of_few_rows(name: str, num_rows: int) -> None:
    """Rows that tiles multiply are packed once for all tasks; some lie behind the last 16."""
    own = WHOLE_BLOCKS if name in (Format.Q4_K, Format.Q2_K) else SPEC
    hidden_size = 512 if own is WHOLE_BLOCKS else 544  # with a short last slab
    spec = dataclasses.replace(
        own, hidden_size=hidden_size, intermediate_size=1024, layers=own.layers[:1]
    )
    weights = random_weights(spec, Format.BF16 if name == "int8" else Format(name))
    options: dict[str, Any] = (
        {"weight_dtype": "int8"} if name == "int8" else {"rounds_activations": True}
    )
    whole = cpu(spec, weights, **options).forward(batch([(0, 0, num_rows)]))
    parts = cpu(spec, weights, **options)
    cuts = [*range(0, num_rows, 4), num_rows]
    few = [parts.forward(batch([(0, a, b)])) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(few), whole)
