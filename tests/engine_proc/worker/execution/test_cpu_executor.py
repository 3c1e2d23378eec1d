"""The CPU executor: right against torch, and the same bits however the work is cut."""

import dataclasses
import itertools
import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from random_decoders import (
    BLOCKS,
    DECODED,
    LENGTH,
    NUM_PAGES,
    SPEC,
    SPECS,
    WHOLE_BLOCKS,
    batch,
    cpu,
    random_weights,
    stored,
    text,
)
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weights
from headrace.engine_proc.worker.execution import cpu_adapters, cpu_executor
from headrace.engine_proc.worker.execution.cache_sizes import page_bytes
from headrace.engine_proc.worker.execution.cpu_executor import Isa, KVDtype, UnsupportedSpec
from headrace.engine_proc.worker.execution.executor import Floats
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, LayerSpec
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor
from headrace.errors import HeadraceError, ModelError
from headrace.system.procfs import resident_bytes

# The arithmetic of a model that is stored in bf16.
BF16: dict[str, Any] = {
    "weight_dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "rounds_activations": True,
}
# Heads that are a multiple neither of 32 nor of 64 numbers.
WIDE_HEADS = dataclasses.replace(
    SPEC, num_heads=3, num_kv_heads=1, head_dim=80, layers=(LayerSpec(window=50), LayerSpec())
)
BYTE_STEPS = np.float32(127)  # in 8 bits, beside int8
CPU_SPECS = SPECS | {"wide heads": WIDE_HEADS}
HEADS = ("gemma", "olmo", "biased norms, clipped", "biases, odd sizes")  # each kind of them


def reference(spec: DecoderSpec, weights: Weights) -> Floats:
    executor = TorchExecutor(spec, weights, num_pages=NUM_PAGES, page_tokens=16)
    return executor.forward(batch([(0, 0, LENGTH)]))


@pytest.fixture(params=CPU_SPECS)
def spec(request: pytest.FixtureRequest) -> DecoderSpec:
    return CPU_SPECS[request.param]


def test_logits_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SPEC.vocab_size,
        hidden_size=SPEC.hidden_size,
        intermediate_size=SPEC.intermediate_size,
        num_hidden_layers=len(SPEC.layers),
        num_attention_heads=SPEC.num_heads,
        num_key_value_heads=SPEC.num_kv_heads,
        head_dim=SPEC.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        rms_norm_eps=SPEC.norm_eps,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    weights = {
        "embed": stored(state["model.embed_tokens.weight"]),
        "norm": stored(state["model.norm.weight"]),
    }
    for i in range(len(SPEC.layers)):
        layer = f"model.layers.{i}."
        weights[f"layers.{i}.attn_norm"] = stored(state[layer + "input_layernorm.weight"])
        weights[f"layers.{i}.mlp_norm"] = stored(state[layer + "post_attention_layernorm.weight"])
        for name in "qkvo":
            weights[f"layers.{i}.{name}"] = stored(state[f"{layer}self_attn.{name}_proj.weight"])
        for name in ("gate", "up", "down"):
            weights[f"layers.{i}.{name}"] = stored(state[f"{layer}mlp.{name}_proj.weight"])
    with torch.inference_mode():
        expected = model(torch.tensor([text(0)])).logits[0].numpy()
    logits = cpu(SPEC, weights).forward(batch([(0, 0, LENGTH)]))
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
def test_every_field_of_the_spec_means_what_torch_says(spec: DecoderSpec, isa: Isa) -> None:
    weights = random_weights(spec)
    try:
        executor = cpu(spec, weights, isa=isa)
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    assert executor.isa == isa
    logits = executor.forward(batch([(0, 0, LENGTH)]))
    np.testing.assert_allclose(logits, reference(spec, weights), atol=2e-4)


def test_no_cut_of_the_work_changes_a_bit(spec: DecoderSpec) -> None:
    whole = cpu(spec, threads=1).forward(batch([(0, 0, LENGTH)]))

    chunked = cpu(spec)
    cuts = [0, 1, 8, 23, 24, 61, 160, 257, 258, 299, LENGTH]
    parts = [chunked.forward(batch([(0, a, b)])) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)

    mixed = cpu(spec, threads=3)
    mixed.forward(batch([(2, 0, 40), (0, 0, 285), (3, 0, 131), (1, 0, 17)]))
    both = mixed.forward(batch([(1, 17, 18), (3, 131, 260), (0, 285, LENGTH), (2, 40, 41)]))
    np.testing.assert_array_equal(both[130:145], whole[285:])


def test_one_token_at_a_time_gives_the_bits_of_the_whole_prompt() -> None:
    whole = cpu(SPEC).forward(batch([(0, 0, 70)]))
    single = cpu(SPEC)
    steps = [single.forward(batch([(0, i, i + 1)])) for i in range(70)]
    np.testing.assert_array_equal(np.concatenate(steps), whole)


def test_the_order_of_sequences_does_not_matter() -> None:
    parts = [(0, 0, 5), (1, 0, 33), (2, 0, 1), (3, 0, 16)]
    logits = cpu(SPEC).forward(batch(parts))
    shuffled = cpu(SPEC).forward(batch([parts[i] for i in (2, 0, 3, 1)]))
    np.testing.assert_array_equal(shuffled[1:6], logits[:5])
    np.testing.assert_array_equal(shuffled[22:], logits[5:38])


@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("page_tokens", [32, 64, 256])
def test_the_page_size_does_not_change_a_bit(page_tokens: int, options: dict[str, Any]) -> None:
    for spec in (SPECS["gemma"], WIDE_HEADS):
        executor = cpu(spec, page_tokens=page_tokens, **options)
        cuts = [0, 1, 8, 23, 24, 61, 160, 257, 258, LENGTH]
        steps = [batch([(0, a, b)], page_tokens) for a, b in itertools.pairwise(cuts)]
        logits = np.concatenate([executor.forward(step) for step in steps])
        whole = cpu(spec, **options).forward(batch([(0, 0, LENGTH)]))
        np.testing.assert_array_equal(logits, whole)


def test_only_the_wanted_rows_are_returned() -> None:
    both = batch([(0, 0, 9), (1, 0, 6)])
    some = dataclasses.replace(both, logit_rows=np.array([8, 14], np.int32))
    logits = cpu(SPEC).forward(some)
    np.testing.assert_array_equal(logits, cpu(SPEC).forward(both)[[8, 14]])


def test_hidden_state_equals_torch_and_chunking_is_bit_exact(spec: DecoderSpec) -> None:
    weights = random_weights(spec)
    step = dataclasses.replace(batch([(0, 0, 60)]), logit_rows=np.array([7, 59], np.int32))
    hidden = cpu(spec, weights).embed(step)
    expected = TorchExecutor(spec, weights, num_pages=NUM_PAGES, page_tokens=16).embed(step)
    assert hidden.shape == (2, spec.hidden_size)
    np.testing.assert_allclose(hidden, expected, atol=2e-4)
    chunked = cpu(spec, weights)
    chunked.embed(batch([(0, 0, 59)]))
    np.testing.assert_array_equal(chunked.embed(batch([(0, 59, 60)])), hidden[1:])


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
@pytest.mark.parametrize("vocab_size", [65, 700])  # a last block that is mostly padding, and parts
@pytest.mark.parametrize("options", [{}, BF16, {"weight_dtype": "int8"}, {"threads": 3}])
@pytest.mark.parametrize("name", HEADS)
def test_maxima_are_those_of_the_logits(
    name: str, options: dict[str, Any], vocab_size: int, isa: Isa
) -> None:
    spec = CPU_SPECS[name]
    spec = dataclasses.replace(spec, vocab_size=vocab_size, layers=spec.layers[:1])
    try:
        executor, other = cpu(spec, isa=isa, **options), cpu(spec, isa=isa, **options)
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    for start, stop in itertools.pairwise([0, 1, 4, 37, 140]):
        step = batch([(0, start, stop)])
        step = dataclasses.replace(step, token_ids=step.token_ids % vocab_size)
        logits = executor.logits(step)
        np.testing.assert_array_equal(logits.rows, other.forward(step))
        largest = np.maximum.reduceat(logits.rows, np.arange(0, vocab_size, 64), axis=1)
        np.testing.assert_array_equal(logits.maxima, largest)


def test_logits_take_the_same_memory_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = cpu(SPEC)
    rows = executor.logits(batch([(0, 0, 40)])).rows
    assert np.shares_memory(rows, executor.logits(batch([(1, 0, 9)])).rows)
    monkeypatch.setattr(cpu_executor, "KEPT_BYTES", rows.nbytes)
    assert not np.shares_memory(
        *(executor.logits(batch([(sequence, 0, 90)])).rows for sequence in (2, 3))
    )


@pytest.mark.parametrize("num_rows", range(1, 9))
def test_rows_of_logits_begin_with_a_cache_line(num_rows: int) -> None:
    rows = cpu(SPEC).forward(batch([(0, 0, num_rows)]))
    assert (rows.ctypes.data % 64, rows.strides[0] % 64) == (0, 0)


def test_step_seconds_are_those_since_the_last_call() -> None:
    executor, nine = cpu(SPEC), batch([(0, 0, 9)])
    executor.forward(nine)
    assert not any(executor.step_seconds().values())  # the first call begins
    start = time.perf_counter()
    executor.forward(nine)
    elapsed = time.perf_counter() - start
    parts = executor.step_seconds()
    assert 0 < sum(parts.values()) < elapsed
    assert {name for name, seconds in parts.items() if seconds == 0} <= {"experts", "waiting"}
    assert not any(executor.step_seconds().values())


def test_a_rest_gives_back_what_steps_take() -> None:
    executor = cpu(dataclasses.replace(SPEC, intermediate_size=1 << 14))
    whole = executor.forward(batch([(0, 0, LENGTH)]))
    before = resident_bytes(os.getpid())
    executor.rest()
    assert before - resident_bytes(os.getpid()) > LENGTH * 4 << 14
    np.testing.assert_array_equal(executor.forward(batch([(0, 0, LENGTH)])), whole)


def test_a_step_may_want_no_logits() -> None:
    silent = dataclasses.replace(batch([(0, 0, 9)]), logit_rows=np.array([], np.int32))
    assert cpu(SPEC).forward(silent).shape == (0, SPEC.vocab_size)


@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
def test_what_another_sequence_left_in_a_page_is_not_seen(options: dict[str, Any]) -> None:
    clean = cpu(SPEC, **options).forward(batch([(0, 0, 21)]))
    weights = dict(random_weights(SPEC))
    numbers = weights["embed"].to_float32()
    unused = next(i for i in range(SPEC.vocab_size) if i not in text(0)[:21])
    numbers[unused] = np.nan
    weights["embed"] = stored(numbers)
    spec = dataclasses.replace(SPEC, tied_head=False)
    executor = cpu(spec, weights | {"head": random_weights(SPEC)["embed"]}, **options)
    poison = batch([(0, 21, LENGTH)])  # rows of the same pages, beyond the next step's tokens
    executor.forward(dataclasses.replace(poison, token_ids=np.full_like(poison.token_ids, unused)))
    np.testing.assert_array_equal(executor.forward(batch([(0, 0, 21)])), clean)


def test_bf16_pages_are_near_and_chunking_is_bit_exact(spec: DecoderSpec) -> None:
    exact = cpu(spec).forward(batch([(0, 0, LENGTH)]))
    whole = cpu(spec, kv_dtype="bfloat16").forward(batch([(0, 0, LENGTH)]))
    assert 0 < np.abs(whole - exact).max() < 0.02 * np.abs(exact).max()
    chunked = cpu(spec, kv_dtype="bfloat16")
    parts = [chunked.forward(batch([(0, a, b)])) for a, b in [(0, 33), (33, 34), (34, LENGTH)]]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_page_takes_the_bytes_of_its_keys_and_values() -> None:
    layers, heads, keys, values = 2, 1, 10, 16  # a value is padded to 16
    spec = SPECS["biases, odd sizes"]
    numbers = layers * heads * 32 * (keys + values)
    assert page_bytes(spec, 32, KVDtype.FLOAT32) == 4 * numbers
    assert page_bytes(spec, 32, KVDtype.BFLOAT16) == 2 * numbers


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
@pytest.mark.parametrize("format", [Format.BF16, *BLOCKS])
def test_packed_weights_give_the_bits_of_decoded_ones(format: Format, isa: Isa) -> None:
    spec = WHOLE_BLOCKS  # columns are decoded in two parts; elsewhere the second is short
    if BLOCKS.get(format, (0,))[0] != 256:
        spec = dataclasses.replace(SPEC, intermediate_size=289 if format == Format.BF16 else 288)
    weights = random_weights(spec, format)
    try:
        packed = cpu(spec, weights, isa=isa)
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    decoded = cpu(spec, weights, weight_dtype="float32", isa=isa)
    for start, stop in itertools.pairwise([0, 1, 3, 6, 10, 15, 24, 45]):  # every tile's height
        step = batch([(0, start, stop)])
        logits = packed.forward(step)
        assert np.isfinite(logits).all() and logits.std() > 0.1
        np.testing.assert_array_equal(logits, decoded.forward(step))


@pytest.mark.parametrize("format", DECODED)
def test_blocks_without_a_kernel_are_executed_decoded(format: Format) -> None:
    weights = random_weights(WHOLE_BLOCKS, format)
    numbers = {name: stored(weight.to_float32(), Format.F32) for name, weight in weights.items()}
    step = batch([(0, 0, 20)])
    logits = cpu(WHOLE_BLOCKS, weights).forward(step)
    assert np.isfinite(logits).all() and logits.std() > 0.1
    np.testing.assert_array_equal(logits, cpu(WHOLE_BLOCKS, numbers).forward(step))


def wide_weights(spec: DecoderSpec) -> Weights:
    """Make weights in bf16, of which a few have exponents far from all others', and one is zero."""
    rng = np.random.default_rng(3)
    weights = random_weights(spec, Format.BF16)
    for name, weight in weights.items():
        if len(weight.shape) == 2:
            numbers = weight.to_float32().reshape(-1).copy()
            places = rng.choice(len(numbers), len(numbers) // 3000 + 1, replace=False)
            numbers[places] *= np.float32(2.0) ** rng.integers(-100, -10, len(places))
            numbers[rng.integers(len(numbers))] = 0.0
            numbers[rng.integers(len(numbers))] *= -1.0
            halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
            weights[name] = StoredTensor(Format.BF16, weight.shape, halves.view(np.uint8))
    return weights


@pytest.mark.parametrize("rounds", [False, True])
def test_bf16_in_12_bits_is_bf16(rounds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dataclasses.replace(SPEC, hidden_size=96, intermediate_size=160)
    weights = wide_weights(spec)
    options: dict[str, Any] = {"rounds_activations": rounds}
    executor = cpu(spec, weights, **options)
    if not executor.suits_bf12(stored(np.zeros((16, 96), np.float32), Format.BF16)):
        pytest.skip("this processor does not read them")
    assert executor.suits_bf12(weights["embed"])
    monkeypatch.setattr(cpu_executor.CpuExecutor, "suits_bf12", lambda *_: False)
    plain = cpu(spec, weights, **options)
    cuts = [0, 1, 3, 6, 13, 29, 62, 110]  # few rows, and one or two tiles of them, and more
    parts = [(0, start, stop) for start, stop in itertools.pairwise(cuts)]
    for part in [*parts, (1, 0, LENGTH)]:  # which is more than are multiplied at once
        step = batch([part])
        np.testing.assert_array_equal(executor.forward(step), plain.forward(step))


# In 12 bits, in 16 with a rest, and of enough outputs for rows in the order of tiles.
@pytest.mark.parametrize("hidden_size, size", [(96, 4096), (96, 4106), (544, 4096)])
def test_wide_rows_have_the_bits_of_any_number_of_rows(hidden_size: int, size: int) -> None:
    """Tiles multiply some columns of many rows at a time, and all columns of few rows."""
    spec = dataclasses.replace(
        SPEC, hidden_size=hidden_size, intermediate_size=size, layers=SPEC.layers[:1]
    )
    weights = random_weights(spec, Format.BF16)
    whole = cpu(spec, weights, rounds_activations=True).forward(batch([(0, 0, LENGTH)]))
    chunked = cpu(spec, weights, rounds_activations=True)
    cuts = [0, 1, 20, 60, LENGTH - 100, LENGTH]
    parts = [(0, start, stop) for start, stop in itertools.pairwise(cuts)]
    logits = np.concatenate([chunked.forward(batch([part])) for part in parts])
    np.testing.assert_array_equal(logits, whole)


def test_12_bits_are_for_exponents_that_differ_little() -> None:
    executor = cpu(SPEC)
    rng = np.random.default_rng(0)

    def suits(halves: npt.NDArray[np.uint16]) -> bool:
        tensor = StoredTensor(Format.BF16, halves.shape, halves.view(np.uint8).reshape(-1))
        return executor.suits_bf12(tensor)

    usual = (rng.standard_normal((300, 64), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if not suits(usual):
        pytest.skip("this processor does not read them")
    assert suits(usual[:1])
    assert not suits(rng.integers(0, 1 << 16, (300, 64), np.uint16))
    assert not suits(usual[:, :48])


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
def test_bf16_rounds_little_and_no_cut_changes_a_bit(spec: DecoderSpec, isa: Isa) -> None:
    try:
        whole = cpu(spec, **BF16, isa=isa).forward(batch([(0, 0, LENGTH)]))
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    exact = cpu(spec, weight_dtype="bfloat16").forward(batch([(0, 0, LENGTH)]))
    error = np.linalg.norm(whole - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.04, error  # of logits, after layers of random weights
    chunked = cpu(spec, **BF16, isa=isa)
    cuts = [0, 1, 3, 6, 10, 15, 23, 41, LENGTH]  # every tile's height
    parts = [chunked.forward(batch([(0, a, b)])) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
def test_bf16_attention_is_batch_invariant(spec: DecoderSpec, isa: Isa) -> None:
    try:
        whole = cpu(spec, **BF16, isa=isa, threads=1).forward(batch([(0, 0, LENGTH)]))
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    mixed = cpu(spec, **BF16, isa=isa, threads=3)
    mixed.forward(batch([(2, 0, 40), (0, 0, 285), (3, 0, 131), (1, 0, 17)]))
    both = mixed.forward(batch([(1, 17, 18), (3, 131, 260), (0, 285, LENGTH), (2, 40, 41)]))
    np.testing.assert_array_equal(both[130:145], whole[285:])


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
def test_the_smallest_numbers_in_bf16_are_the_same_in_every_cut(isa: Isa) -> None:
    """Products that are denormal: some instructions take them for zero, so then all must."""
    spec = dataclasses.replace(SPEC, layers=(), tied_head=False)
    weights = random_weights(spec, Format.BF16)
    tiny = weights["head"].to_float32() * np.float32(2.0**-124)
    halves = (tiny.view(np.uint32) >> 16).astype(np.uint16)
    weights["head"] = StoredTensor(Format.BF16, tiny.shape, halves.view(np.uint8).reshape(-1))
    try:
        executor = cpu(spec, weights, rounds_activations=True, isa=isa)
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    whole = executor.forward(batch([(0, 0, 40)]))
    assert 0 < np.abs(whole).max() < 1e-36
    cuts = [0, 1, 3, 6, 22, 40]
    parts = [executor.forward(batch([(0, a, b)])) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts).view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
@pytest.mark.parametrize("hidden_size", [96, 77])
def test_bf16_is_a_product_of_rounded_numbers(hidden_size: int, isa: Isa) -> None:
    spec = dataclasses.replace(SPEC, layers=(), tied_head=False, hidden_size=hidden_size)
    weights = random_weights(spec, Format.BF16)
    step = batch([(0, 0, 30)])
    try:
        executor = cpu(spec, weights, rounds_activations=True, isa=isa)
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    x = torch.from_numpy(executor.embed(step)).bfloat16().double().numpy()
    expected = x @ weights["head"].to_float32().T.astype(np.float64)
    np.testing.assert_allclose(executor.forward(step), expected, atol=1e-5)


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
def test_int8_rounds_little_and_no_cut_changes_a_bit(spec: DecoderSpec, isa: Isa) -> None:
    weights = random_weights(spec)
    try:
        whole = cpu(spec, weights, weight_dtype="int8", isa=isa).forward(batch([(0, 0, 150)]))
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    exact = cpu(spec, weights).forward(batch([(0, 0, 150)]))
    error = np.linalg.norm(whole - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.08, error  # of logits, after layers of random weights
    chunked = cpu(spec, weights, weight_dtype="int8", isa=isa)
    cuts = [0, 1, 3, 6, 10, 15, 25, 150]  # every tile's height
    parts = [chunked.forward(batch([(0, a, b)])) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_int8_weights_alone_are_those_of_q8_0() -> None:
    weights = random_weights(SPEC, Format.BF16)
    rounded = {
        name: tensor.to_q8_0() if len(tensor.shape) == 2 else tensor
        for name, tensor in weights.items()
    }
    step = batch([(0, 0, 60)])
    logits = cpu(SPEC, weights, weight_dtype="int8_weight_only").forward(step)
    np.testing.assert_array_equal(logits, cpu(SPEC, rounded).forward(step))
    exact = cpu(SPEC, weights).forward(step)
    assert 0 < np.linalg.norm(logits - exact) / np.linalg.norm(exact) < 0.05
    for odd in (SPECS["biases, odd sizes"], WHOLE_BLOCKS):  # what cannot or need not be rounded ...
        stored = random_weights(odd, Format.Q4_K if odd is WHOLE_BLOCKS else Format.BF16)
        kept = cpu(odd, stored, weight_dtype="int8_weight_only").forward(step)
        np.testing.assert_array_equal(kept, cpu(odd, stored).forward(step))  # ... stays


def test_int8_is_a_product_of_integers_and_scales() -> None:
    """The very numbers, from a model whose logits are a product with nothing before it."""
    spec = dataclasses.replace(SPEC, layers=(), tied_head=False, vocab_size=40)
    weights = random_weights(spec)
    step = dataclasses.replace(batch([(0, 0, 30)]), token_ids=np.arange(30, dtype=np.int32))
    executor = cpu(spec, weights, weight_dtype="int8")
    x, w = (a.reshape(len(a), 3, 32) for a in (executor.embed(step), weights["head"].to_float32()))
    x_largest = np.abs(x).max(-1, keepdims=True)
    x_scale = x_largest / BYTE_STEPS
    w_scale = (np.abs(w).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    dots = np.einsum(
        "tgi,vgi->tvg", np.rint(x * (BYTE_STEPS / x_largest)), np.rint(w / w_scale).clip(-127, 127)
    )
    expected = (dots * x_scale[:, None, :, 0] * w_scale[None, :, :, 0]).sum(-1)
    np.testing.assert_allclose(executor.forward(step), expected, atol=2e-5)


@pytest.mark.parametrize("format", BLOCKS)
def test_blocks_give_the_same_bits_on_each_instruction_set(format: Format) -> None:
    """But the portable one, which rounds a product before it adds it."""
    spec = WHOLE_BLOCKS if BLOCKS[format][0] == 256 else SPEC
    spec = dataclasses.replace(spec, layers=())
    weights = random_weights(spec, format)
    try:
        of_each = [
            cpu(spec, weights, rounds_activations=True, isa=isa).forward(batch([(0, 0, 30)]))
            for isa in (Isa.AVX2, Isa.AVX512)
        ]
    except UnsupportedSpec:
        pytest.skip("not both here")
    np.testing.assert_array_equal(*of_each)


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512])
@pytest.mark.parametrize("format", BLOCKS)
def test_blocks_round_little_and_no_cut_changes_a_bit(format: Format, isa: Isa) -> None:
    spec = WHOLE_BLOCKS if BLOCKS[format][0] == 256 else SPEC
    weights = random_weights(spec, format)
    try:
        executor = cpu(spec, weights, rounds_activations=True, isa=isa)
    except UnsupportedSpec:
        pytest.skip(f"no {isa} here")
    whole = executor.forward(batch([(0, 0, 150)]))
    exact = cpu(spec, weights).forward(batch([(0, 0, 150)]))
    error = np.linalg.norm(whole - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.001, error  # of logits; with activations in 8 bits 0.003 to 0.07
    cuts = [0, 1, 3, 6, 10, 15, 25, 150]
    parts = [executor.forward(batch([(0, a, b)])) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("format", [Format.Q4_0, Format.BF16, Format.F32])
def test_matrices_of_one_product_may_differ_in_format(format: Format) -> None:
    """Each has activations as its own weights want them."""
    weights = dict(random_weights(SPEC, Format.Q8_0))
    others = random_weights(SPEC, format)
    weights |= {name: others[name] for name in others if name.endswith((".k", ".up"))}
    logits = cpu(SPEC, weights, rounds_activations=True).forward(batch([(0, 0, 60)]))
    exact = cpu(SPEC, weights).forward(batch([(0, 0, 60)]))
    assert 0 < np.linalg.norm(logits - exact) / np.linalg.norm(exact) < 0.08


@pytest.mark.parametrize("format", BLOCKS)
def test_weights_alone_are_rounded_where_that_is_asked_for(format: Format) -> None:
    spec = WHOLE_BLOCKS if BLOCKS[format][0] == 256 else SPEC
    weights = random_weights(spec, format)
    executor = cpu(spec, weights, weight_dtype="int8_weight_only", rounds_activations=True)
    step = batch([(0, 0, 60)])
    np.testing.assert_array_equal(executor.forward(step), cpu(spec, weights).forward(step))


def test_odd_sizes_can_be_had_in_bf16() -> None:
    spec = SPECS["biases, odd sizes"]
    weights = random_weights(spec, Format.BF16)
    logits = cpu(spec, weights).forward(batch([(0, 0, LENGTH)]))
    decoded = cpu(spec, weights, weight_dtype="float32")
    np.testing.assert_array_equal(logits, decoded.forward(batch([(0, 0, LENGTH)])))


def test_half_precision_weights_can_be_had_in_bf16() -> None:
    weights = random_weights(SPEC)
    rounded = {
        name: stored(torch.from_numpy(tensor.to_float32()).bfloat16().float().numpy())
        if len(tensor.shape) == 2
        else tensor
        for name, tensor in weights.items()
    }
    logits = cpu(SPEC, weights, weight_dtype="bfloat16").forward(batch([(0, 0, 50)]))
    np.testing.assert_array_equal(logits, cpu(SPEC, rounded).forward(batch([(0, 0, 50)])))


def test_a_weight_of_the_wrong_shape_is_named() -> None:
    weights = dict(random_weights(SPEC))
    weights["layers.1.up"] = stored(np.zeros((95, 96), np.float32))
    with pytest.raises(ModelError, match=r"'layers.1.up' has shape \[95, 96\], not \[160, 96\]"):
        cpu(SPEC, weights)


def test_a_missing_weight_is_named() -> None:
    weights = dict(random_weights(SPEC))
    del weights["norm"]
    with pytest.raises(ModelError, match="'norm' is missing"):
        cpu(SPEC, weights)


def test_a_batch_out_of_range_is_refused() -> None:
    executor = cpu(SPEC)
    good = batch([(0, 0, 3)])
    for field, value in (
        ("token_ids", SPEC.vocab_size),
        ("positions", -1),
        ("positions", LENGTH + 100),
        ("sequences", 4),
        ("logit_rows", 3),
        ("page_table", NUM_PAGES),
    ):
        bad = dataclasses.replace(good, **{field: np.full_like(getattr(good, field), value)})
        with pytest.raises(ValueError, match="beyond its range"):
            executor.forward(bad)


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    cpu(SPEC, progress=lambda done, total: seen.append((done, total)))
    total = len(weight_shapes(SPEC))
    assert seen == [(done, total) for done in range(total + 1)]


@pytest.mark.parametrize("functions", [{}, {"headrace_cpu_struct_bytes": lambda: 8}])
def test_a_core_of_another_version_is_refused(
    functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OtherCore(SimpleNamespace):
        __getitem__ = SimpleNamespace.__getattribute__

    monkeypatch.setattr(cpu_executor, "load_core", lambda: OtherCore(**functions))
    monkeypatch.setattr(cpu_adapters, "load_core", lambda: OtherCore(**functions))
    for declare in (cpu_executor.declared_core.__wrapped__, cpu_adapters.declared_core):
        with pytest.raises(HeadraceError, match="is of another version; build it"):
            declare()
