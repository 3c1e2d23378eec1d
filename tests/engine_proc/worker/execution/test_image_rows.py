"""Tokens of images: their rows come with the step, and positions and masks may be their own."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from random_decoders import (
    LENGTH,
    NUM_PAGES,
    NUM_ROWS,
    SPEC,
    SPECS,
    batch,
    cpu,
    random_weights,
    with_images,
)

from headrace.engine_proc.worker.execution.executor import Floats
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor

MROPE = SPECS["mrope"]


@pytest.fixture(params=["llama", "gemma", "mrope"])
def spec(request: pytest.FixtureRequest) -> DecoderSpec:
    return SPECS[request.param]


def run(spec: DecoderSpec, cuts: list[int], **options: Any) -> Floats:
    executor = cpu(spec, **options)
    steps = [with_images(batch([(0, a, b)]), spec) for a, b in itertools.pairwise(cuts)]
    return np.concatenate([executor.forward(step) for step in steps])


@pytest.mark.parametrize("isa", ["portable", "best"])
def test_images_mean_what_torch_says(spec: DecoderSpec, isa: str) -> None:
    step = with_images(batch([(0, 0, LENGTH)]), spec)
    torch = TorchExecutor(spec, random_weights(spec), num_pages=NUM_PAGES, page_tokens=16)
    np.testing.assert_allclose(run(spec, [0, LENGTH], isa=isa), torch.forward(step), atol=2e-4)


def test_no_cut_between_images_changes_a_bit(spec: DecoderSpec) -> None:
    whole = run(spec, [0, LENGTH], threads=1)
    cuts = [0, 4, 5, 21, 23, 40, 71, 72, 239, 271, 299, LENGTH]
    np.testing.assert_array_equal(run(spec, cuts, threads=3), whole)


def test_images_in_bf16_round_little_and_no_cut_changes_a_bit(spec: DecoderSpec) -> None:
    bf16 = {"weight_dtype": "bfloat16", "kv_dtype": "bfloat16"}
    exact = run(spec, [0, LENGTH], **bf16)
    whole = run(spec, [0, LENGTH], **bf16, rounds_activations=True, threads=1)
    error = np.linalg.norm(whole - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.04, error
    cuts = [0, 4, 5, 21, 23, 40, 71, 72, 239, 271, 299, LENGTH]
    parts = run(spec, cuts, **bf16, rounds_activations=True, threads=3)
    np.testing.assert_array_equal(parts, whole)


def test_images_may_be_cut_where_their_tokens_see_no_later_ones() -> None:
    def logits(cuts: list[int]) -> Floats:
        executor = cpu(MROPE)
        steps = [batch([(0, a, b)]) for a, b in itertools.pairwise(cuts)]
        parts = [executor.forward(with_images(step, MROPE, whole=False)) for step in steps]
        return np.concatenate(parts)

    np.testing.assert_array_equal(logits([0, 7, 13, 50, 262, LENGTH]), logits([0, LENGTH]))


def test_texts_beside_images_keep_their_bits(spec: DecoderSpec) -> None:
    parts = [(1, 0, 30), (0, 0, 80), (2, 0, 9)]
    mixed = with_images(batch(parts), spec)
    is_text = mixed.sequences != 0
    plain = batch(parts)
    mixed = dataclasses.replace(
        mixed,
        embed_rows=np.where(is_text, -1, mixed.embed_rows),
        rope_positions=np.where(is_text[:, None], plain.positions[:, None], mixed.rope_positions),
        last_seen=np.where(is_text, plain.positions, mixed.last_seen),
    )
    logits = cpu(spec).forward(mixed)
    np.testing.assert_array_equal(logits[is_text], cpu(spec).forward(plain)[is_text])
    alone = cpu(spec).forward(with_images(batch([(0, 0, 80)]), spec))
    np.testing.assert_array_equal(logits[~is_text], alone)


def test_mrope_without_images_uses_one_position_for_all() -> None:
    plain = batch([(0, 0, LENGTH)])
    np.testing.assert_array_equal(cpu(MROPE).forward(plain), cpu(SPEC).forward(plain))


def test_image_rows_skip_the_embedding_multiplier() -> None:
    spec = dataclasses.replace(SPEC, layers=(), embedding_multiplier=8.0)
    once = dataclasses.replace(spec, embedding_multiplier=1.0)
    step = with_images(batch([(0, 0, LENGTH)]), spec)
    images = step.embed_rows >= 0  # type: ignore[operator]
    weights = {**random_weights(spec)}
    both = [cpu(each, weights).forward(step) for each in (spec, once)]
    np.testing.assert_array_equal(both[0][images], both[1][images])


@pytest.mark.parametrize("value", [-2, NUM_ROWS])
def test_a_row_out_of_range_is_refused(value: int) -> None:
    step = with_images(batch([(0, 0, 9)]), SPEC, whole=False)
    bad = dataclasses.replace(step, embed_rows=np.full(9, value, np.int32))
    with pytest.raises(ValueError, match="beyond its range"):
        cpu(SPEC).forward(bad)


@pytest.mark.parametrize("value", [3, 9, 1 << 30])
def test_token_sees_at_least_itself_and_nothing_past_the_step(value: int) -> None:
    step = with_images(batch([(0, 0, 5), (1, 0, 20)]), SPEC)
    seen = np.array(step.positions)
    seen[4] = value
    with pytest.raises(ValueError, match="beyond its range"):
        cpu(SPEC).forward(dataclasses.replace(step, last_seen=seen))
