"""Mixtures on the CPU: right against torch, and the same bits whatever else is in a step."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from drawn_steps import assert_bits_alone, drawn_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from random_decoders import (
    BLOCKS,
    LENGTH,
    MIXTURES,
    NUM_PAGES,
    SPEC,
    WHOLE_BLOCKS,
    batch,
    cpu,
    random_weights,
    stored,
    with_mixture,
)
from transformers.models.phimoe import modeling_phimoe

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weights
from headrace.engine_proc.worker.execution.cpu_executor import Isa, UnsupportedSpec
from headrace.engine_proc.worker.execution.executor import Floats
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    MixtureSpec,
    RouterScore,
)
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor
from headrace.engine_proc.worker.reference.torch_mixture import choose_experts

BF16: dict[str, Any] = {
    "weight_dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "rounds_activations": True,
}
ARITHMETIC: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "int8": {"weight_dtype": "int8"},
}
FEW_TO_MANY = [0, 1, 3, 6, 10, 15, 24, 45, 150]  # rows: every tile's height


def reference(spec: DecoderSpec, weights: Weights, length: int = LENGTH) -> Floats:
    executor = TorchExecutor(spec, weights, num_pages=NUM_PAGES, page_tokens=16)
    return executor.forward(batch([(0, 0, length)]))


def replaced(weights: Weights, **numbers: Floats) -> Weights:
    """Replace weights of the first layer; `_` in a keyword is a dot in the name."""
    layer = {f"layers.0.{name.replace('_', '.')}": stored(new) for name, new in numbers.items()}
    assert layer.keys() <= weights.keys()
    return {**weights, **layer}


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
@pytest.mark.parametrize("name", MIXTURES)
def test_every_field_of_a_mixture_means_what_torch_says(name: str, isa: Isa) -> None:
    spec = MIXTURES[name]
    weights = random_weights(spec)
    try:
        executor = cpu(spec, weights, isa=isa)
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    logits = executor.forward(batch([(0, 0, LENGTH)]))
    np.testing.assert_allclose(logits, reference(spec, weights), atol=2e-4)


def test_sparsemixer_is_that_of_transformers() -> None:
    logits = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    mixture = MixtureSpec(
        num_experts=16,
        experts_per_token=2,
        intermediate_size=1,
        score=RouterScore.SPARSEMIXER,
        normalized=False,
        sparsemixer_eps=0.2,
    )
    experts, weights = choose_experts(mixture, logits, None)
    sparsemixer: Any = modeling_phimoe.sparsemixer
    expected_weights, expected = sparsemixer(logits, jitter_eps=0.2, training=False)
    torch.testing.assert_close(experts, expected)
    torch.testing.assert_close(weights, expected_weights)


@settings(max_examples=25)
@given(data=st.data())
def test_batch_mates_change_no_bit_of_a_mixture(data: st.DataObject) -> None:
    """Draws batches, chunks and thread counts."""
    spec = MIXTURES[data.draw(st.sampled_from(sorted(MIXTURES)))]
    options = ARITHMETIC[data.draw(st.sampled_from(sorted(ARITHMETIC)))]
    length = data.draw(st.integers(1, 120))
    alone = cpu(spec, threads=1, **options).forward(batch([(0, 0, length)]))
    executor = cpu(spec, threads=data.draw(st.integers(1, 4)), **options)
    for parts in drawn_steps(data, length, LENGTH):
        assert_bits_alone(parts, executor.forward(batch(parts)), alone)


def mixture_for(format: Format) -> DecoderSpec:
    """Return a decoder whose experts have whole blocks of a format."""
    wide = BLOCKS.get(format, (0,))[0] == 256
    size = 256 if wide else 64
    return with_mixture(
        WHOLE_BLOCKS if wide else SPEC, intermediate_size=size, shared_intermediate_size=size
    )


@pytest.mark.parametrize("format", [Format.BF16, *BLOCKS])
def test_packed_experts_give_the_bits_of_decoded_ones(format: Format) -> None:
    spec = mixture_for(format)
    weights = random_weights(spec, format)
    packed, decoded = cpu(spec, weights), cpu(spec, weights, weight_dtype="float32")
    for start, stop in itertools.pairwise(FEW_TO_MANY):
        step = batch([(0, start, stop)])
        logits = packed.forward(step)
        assert np.isfinite(logits).all() and logits.std() > 0.1
        np.testing.assert_array_equal(logits, decoded.forward(step))


@pytest.mark.parametrize("format", [Format.BF16, *BLOCKS])
def test_rounded_rows_of_experts_are_the_same_in_any_cut(format: Format) -> None:
    spec = mixture_for(format)
    weights = random_weights(spec, format)
    whole = cpu(spec, weights, rounds_activations=True).forward(batch([(0, 0, 150)]))
    chunked = cpu(spec, weights, rounds_activations=True, threads=3)
    parts = [chunked.forward(batch([(0, a, b)])) for a, b in itertools.pairwise(FEW_TO_MANY)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    exact = cpu(spec, weights).forward(batch([(0, 0, 150)]))
    errors = np.linalg.norm(whole - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert 0 < np.median(errors) < 0.1  # some tokens meet another expert


@pytest.mark.parametrize("dtype", ["int8", "int8_weight_only"])
def test_experts_in_8_bits_are_near(dtype: str) -> None:
    spec = mixture_for(Format.BF16)
    weights = random_weights(spec, Format.BF16)
    step = batch([(0, 0, 60)])
    logits, exact = cpu(spec, weights, weight_dtype=dtype).forward(step), cpu(spec, weights)
    errors = np.linalg.norm(logits - exact.forward(step), axis=1)
    assert 0 < np.median(errors) / np.linalg.norm(logits, axis=1).mean() < 0.1


def test_experts_in_different_formats_are_decoded() -> None:
    spec = mixture_for(Format.Q8_0)
    weights = dict(random_weights(spec, Format.Q8_0))
    others = random_weights(spec, Format.MXFP4)
    weights |= {name: others[name] for name in weights if ".experts.3." in name}
    decoded = cpu(spec, weights, weight_dtype="float32")
    step = batch([(0, 0, 60)])
    np.testing.assert_array_equal(cpu(spec, weights).forward(step), decoded.forward(step))


def test_equal_scores_choose_the_first_experts() -> None:
    spec = with_mixture(num_experts=6, experts_per_token=2)
    spec = dataclasses.replace(spec, layers=spec.layers[:1])
    weights = random_weights(spec)
    nothing = np.full((SPEC.hidden_size, 48), np.nan, np.float32)
    tied = replaced(
        weights,
        router=np.zeros((6, SPEC.hidden_size), np.float32),
        **{f"experts_{expert}_down": nothing for expert in range(2, 6)},
    )
    logits = cpu(spec, tied).forward(batch([(0, 0, 60)]))
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits, reference(spec, tied, 60), atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, LENGTH])
def test_one_expert_may_be_chosen_by_all_tokens(length: int) -> None:
    """The others have rows that are not numbers, and are chosen by none."""
    spec = with_mixture(num_experts=7, experts_per_token=1, router_bias=True, expert_bias=True)
    weights = random_weights(spec)
    bias = np.where(np.arange(7) == 4, 1000, 0).astype(np.float32)
    nothing = np.full((48, SPEC.hidden_size), np.nan, np.float32)
    one = replaced(
        weights,
        router_bias=bias,
        **{f"experts_{expert}_up": nothing for expert in range(7) if expert != 4},
    )
    logits = cpu(spec, one, threads=3).forward(batch([(0, 0, length)]))
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits, reference(spec, one, length), atol=2e-4)


@pytest.mark.parametrize("name", MIXTURES)
def test_router_that_is_not_a_number_harms_no_other_token(name: str) -> None:
    spec = MIXTURES[name]
    weights = dict(random_weights(spec))
    step = batch([(0, 0, 9), (1, 0, 20)])
    clean = cpu(spec, weights).forward(step)
    numbers = weights["embed"].to_float32()
    unused = next(i for i in range(spec.vocab_size) if i not in step.token_ids[9:])
    head = weights["embed"]
    numbers[unused] = np.nan
    weights["embed"], weights["head"] = stored(numbers), head
    spec = dataclasses.replace(spec, tied_head=False)
    poisoned = dataclasses.replace(step, token_ids=step.token_ids.copy())
    poisoned.token_ids[3] = unused
    logits = cpu(spec, weights).forward(poisoned)
    assert np.isnan(logits[3]).all()
    np.testing.assert_array_equal(logits[9:], clean[9:])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_groups": 5}, "12 experts in 5 groups"),
        ({"weighs_inputs": True, "expert_bias": True}, "experts with biases, whose inputs are"),
        ({"experts_per_token": 13}, "13 experts for each token, of 1 groups of 12"),
        ({"num_groups": 6, "groups_per_token": 1}, "3 experts for each token, of 1 groups of 2"),
        ({"num_groups": 2, "groups_per_token": 3}, "3 of 2 groups for each token"),
        ({"num_groups": 2, "group_score_experts": 9}, "9 experts score a group"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(fields: dict[str, int], message: str) -> None:
    spec = with_mixture(**fields)
    with pytest.raises(UnsupportedSpec, match=message):
        cpu(spec)


def test_bf16_experts_in_12_bits_are_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = mixture_for(Format.BF16)
    weights = {
        name: weight if len(weight.shape) == 1 else outliers(weight.to_float32())
        for name, weight in random_weights(spec, Format.BF16).items()
    }
    executor = cpu(spec, weights)
    if not executor.suits_bf12(weights["layers.0.experts.0.gate"]):
        pytest.skip("this processor does not read them")
    monkeypatch.setattr(type(executor), "suits_bf12", lambda *_: False)
    plain = cpu(spec, weights)
    for start, stop in itertools.pairwise(FEW_TO_MANY):
        step = batch([(0, start, stop)])
        np.testing.assert_array_equal(executor.forward(step), plain.forward(step))


def outliers(numbers: Floats) -> StoredTensor:
    """Return a matrix of bf16, of which a few numbers are far smaller than all others."""
    rng = np.random.default_rng(3)
    flat = numbers.reshape(-1).copy()
    places = rng.choice(len(flat), len(flat) // 3000 + 1, replace=False)
    flat[places] *= np.float32(2.0) ** -60
    return stored(flat.reshape(numbers.shape), Format.BF16)
