"""Adapters in the C++ core: as merged weights, and the same bits whatever else is in the step."""

import dataclasses
import itertools

import numpy as np
import pytest
from random_adapters import merged, random_adapter
from random_decoders import (
    HYBRIDS,
    LATENTS,
    LENGTH,
    MIXTURES,
    NUM_PAGES,
    NUM_STATES,
    SPEC,
    SPECS,
    WHOLE_BLOCKS,
    batch,
    cpu,
    random_weights,
    stored,
    with_states,
)

from headrace.engine_proc.worker.adapters.low_rank import LowRank, LowRanks
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cpu_adapters import PackedAdapter
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor

UNTIED = {name: dataclasses.replace(spec, tied_head=False) for name, spec in SPECS.items()}
SHORT = 40  # tokens
CUTS = (0, 1, 7, 33, LENGTH)


def adapted(
    spec: DecoderSpec, *adapters: LowRanks, format: Format = Format.F32, **options: object
) -> CpuExecutor:
    executor = cpu(spec, **options)  # type: ignore[arg-type]
    for slot, adapter in enumerate(adapters):
        PackedAdapter(executor, adapter, format).install(executor, slot)
    return executor


def with_adapters(step: Batch, slots: dict[int, int]) -> Batch:
    """Give sequences of a batch the slots of their adapters."""
    column = np.full(len(step.page_table), -1, np.int32)
    column[list(slots)] = list(slots.values())
    return dataclasses.replace(step, adapters=column)


def run(executor: CpuExecutor, slots: dict[int, int]) -> Floats:
    """Return the logits of some sequences, all in one step, with the adapters of slots."""
    step = batch([(sequence, 0, SHORT) for sequence in slots])
    step = with_states(step) if executor.spec.state_numbers else step
    return executor.forward(with_adapters(step, slots))


@pytest.mark.parametrize("name", UNTIED)
@pytest.mark.parametrize("gain", [False, True])
def test_adapter_is_what_torch_makes_of_merged_weights(name: str, gain: bool) -> None:
    spec = UNTIED[name]
    adapter = random_adapter(spec, 1, rank=5, gain=gain)
    weights = merged(random_weights(spec), adapter)
    reference = TorchExecutor(spec, weights, num_pages=NUM_PAGES, page_tokens=16)
    expected = reference.forward(batch([(0, 0, SHORT)]))
    np.testing.assert_allclose(run(adapted(spec, adapter), {0: 0}), expected, atol=1e-3)


@pytest.mark.parametrize("name", MIXTURES)
def test_adapter_of_experts_is_as_merged_weights(name: str) -> None:
    spec = dataclasses.replace(MIXTURES[name], tied_head=False)
    adapters = [random_adapter(spec, seed, rank, std=0.05) for seed, rank in ((1, 5), (2, 20))]
    adapters[0] = uneven(adapters[0])
    executor = adapted(spec, *adapters)
    together = run(executor, {0: 1, 1: 0, 2: -1, 3: 0})
    for sequence, adapter in enumerate([adapters[1], adapters[0], {}, adapters[0]]):
        weights = merged(random_weights(spec), adapter)
        expected = run(cpu(spec, weights), {sequence: -1})
        own = together[sequence * SHORT : (sequence + 1) * SHORT]
        np.testing.assert_allclose(own, expected, atol=1e-3, err_msg=str(sequence))


def uneven(adapter: LowRanks) -> LowRanks:
    """Return an adapter whose experts differ in rank, scale and gain, and some have none."""
    changed = dict(adapter)
    for i, name in enumerate(name for name in adapter if ".experts." in name):
        own = adapter[name]
        if i % 4 == 0:
            del changed[name]
        elif i % 4 == 1:
            assert own.a is not None
            changed[name] = LowRank(own.a.rows(0, 3), own.b.columns(0, 3), 0.3, own.gain)
        elif i % 4 == 2:
            gain = np.linspace(0.5, 1.5, own.b.shape[0], dtype=np.float32)
            changed[name] = dataclasses.replace(own, gain=gain)
    return changed


@pytest.mark.parametrize("name", [*HYBRIDS, *LATENTS])
def test_adapter_of_other_mixers_is_as_merged_weights(name: str) -> None:
    spec = dataclasses.replace((HYBRIDS | LATENTS)[name], tied_head=False)
    adapter = random_adapter(spec, 1, rank=4)
    weights = merged(random_weights(spec), adapter)
    expected = run(cpu(spec, weights, num_states=NUM_STATES), {0: -1})
    got = run(adapted(spec, adapter, num_states=NUM_STATES), {0: 0})
    np.testing.assert_allclose(got, expected, atol=1e-3)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("name", ["embed", "head"])
def test_adapter_of_one_end_leaves_the_tied_other(name: str, is_whole: bool) -> None:
    weights = random_weights(SPEC)
    low_rank = random_adapter(SPEC, 1, rank=4, names=[name])[name]
    if is_whole:
        low_rank = LowRank(None, stored(low_rank.delta), 1.0)
    untied = dataclasses.replace(SPEC, tied_head=False)
    both = merged({**weights, "head": weights["embed"]}, {name: low_rank})
    expected = run(cpu(untied, both), {1: -1})
    executor = adapted(SPEC, {name: low_rank}, random_adapter(SPEC, 2, rank=4))
    together = run(executor, {0: 1, 1: 0, 2: -1})
    np.testing.assert_allclose(together[SHORT : 2 * SHORT], expected, atol=1e-4)
    np.testing.assert_array_equal(together[2 * SHORT :], run(cpu(SPEC, weights), {2: -1}))


BF16 = {"weight_dtype": "bfloat16", "kv_dtype": "bfloat16", "rounds_activations": True}
EXPERTS = MIXTURES["qwen2_moe"]
INT8 = {"weight_dtype": "int8", "rounds_activations": True}


@pytest.mark.parametrize("options", [{}, BF16, INT8], ids=["fp32", "bf16", "int8"])
@pytest.mark.parametrize("spec", [WHOLE_BLOCKS, EXPERTS], ids=["dense", "experts"])
def test_batch_mates_and_cuts_change_no_bit(spec: DecoderSpec, options: dict[str, object]) -> None:
    adapters = [random_adapter(spec, seed, rank) for seed, rank in ((1, 3), (2, 16), (3, 40))]
    executor = adapted(spec, *adapters, format=Format.BF16, **options)
    slots = {0: 1, 1: -1, 2: 2, 3: 0}
    together = run(executor, slots)
    for sequence, slot in slots.items():
        own = together[sequence * SHORT : (sequence + 1) * SHORT]
        np.testing.assert_array_equal(own, run(executor, {sequence: slot}))
    without = adapted(spec, **options)
    np.testing.assert_array_equal(run(executor, {1: -1}), run(without, {1: -1}))

    whole = executor.forward(with_adapters(batch([(0, 0, LENGTH)]), {0: 1}))
    single = adapted(spec, *adapters, format=Format.BF16, threads=1, **options)
    parts = [
        single.forward(with_adapters(batch([(0, a, b), (1, a, b)]), {0: 1, 1: 2}))[: b - a]
        for a, b in itertools.pairwise(CUTS)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("stored_as", [Format.F16, Format.BF16])
@pytest.mark.parametrize("held_as", [Format.F32, Format.BF16])
def test_factors_of_16_bits_are_as_the_same_numbers_in_32(
    stored_as: Format, held_as: Format
) -> None:
    short = {name: stored_in(stored_as, own) for name, own in random_adapter(SPEC, 1, 5).items()}
    long = {name: stored_in(Format.F32, own) for name, own in short.items()}
    got, expected = (run(adapted(SPEC, own, format=held_as), {0: 0}) for own in (short, long))
    np.testing.assert_array_equal(got, expected)


def stored_in(format: Format, own: LowRank) -> LowRank:
    """Return factors as another format has them."""
    assert own.a is not None
    a, b = (whole.to_float32() for whole in (own.a, own.b))
    if format is Format.F16:
        a, b = a.astype(np.float16), b.astype(np.float16)
    return LowRank(stored(a, format), stored(b, format), own.scale, own.gain)


def test_slot_takes_another_adapter_and_none() -> None:
    first, second = (random_adapter(SPEC, seed, rank=4) for seed in (1, 2))
    few = random_adapter(SPEC, 3, rank=4, names=["layers.1.down"])
    executor = adapted(SPEC, first, second)
    of_second = run(executor, {1: 1})
    PackedAdapter(executor, few, Format.F32).install(executor, 0)
    together = run(executor, {0: 0, 1: 1})
    np.testing.assert_array_equal(together[:SHORT], run(adapted(SPEC, few), {0: 0}))
    np.testing.assert_array_equal(together[SHORT:], of_second)


@pytest.mark.parametrize("slot", [1, -2])
def test_slot_without_an_adapter_is_out_of_range(slot: int) -> None:
    executor = adapted(SPEC, random_adapter(SPEC, 1, rank=4))
    with pytest.raises(ValueError, match="adapter"):
        run(executor, {0: slot})
