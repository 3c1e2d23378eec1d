"""Adapters of experts, as PEFT saves them: each changes logits as merged weights do."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemma_models import tiny_gemma
from mixture_models import EXECUTORS, PROMPT, STRANGER, TINY, batch, reference, tiny_mixture
from peft_folders import LINEAR, separately, write_adapter
from random_models import random_model
from worker_teams import Team

from headrace.engine_proc.worker.adapters.adapter_opener import AdaptedModel, open_adapter
from headrace.engine_proc.worker.adapters.expert_factors import ExpertStacks, of_parameters
from headrace.engine_proc.worker.adapters.factors import AdapterRefused, Factors
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor
from headrace.engine_proc.worker.execution.cpu_adapters import PackedAdapter
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.parallel.shard import shards

STACKS = ("experts.gate_up_proj", "experts.down_proj")
CASES: dict[str, tuple[str, ...]] = {  # linear layers, of shared experts too
    "qwen3_moe": LINEAR,
    "qwen2_moe": LINEAR,
    "mixtral": (),
    "gpt_oss": ("q_proj",),
    "granitemoeshared": ("o_proj",),
    "llama4_text": LINEAR,
}
NAMES = {  # of experts that are modules
    "qwen3_moe": {kind: f"mlp.experts.{{}}.{kind}_proj" for kind in ("gate", "up", "down")},
    "mixtral": {
        kind: f"block_sparse_moe.experts.{{}}.{name}"
        for kind, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}


def saved(folder: Path, case: str, **options: Any) -> tuple[AdaptedModel, Any]:
    """Save a model and an adapter of it; return the first, and the second merged."""
    model = tiny_mixture(case)
    model.save_pretrained(folder / "model")
    opened = open_model(folder / "model")
    merged = write_adapter(folder / "adapter", model, 1, 4, CASES[case], **options)
    return AdaptedModel(opened.spec, opened.weights, is_gguf=False, max_rank=8), merged


def step(adapter: int) -> Batch:
    """Return the prompt with an adapter, between strangers without."""
    parts = [(STRANGER, 0, [5, 5]), (PROMPT, 0, [6, 1]), (STRANGER, 0, [4, 4])]
    adapters = np.array([-1, adapter, -1], np.int32)
    return dataclasses.replace(batch(parts), adapters=adapters)


def logits_of(executor: CpuExecutor | Team, adapter: int = 0) -> Any:
    """Return those of the prompt."""
    return executor.forward(step(adapter))[len(STRANGER) :][: len(PROMPT)]


def install(executor: CpuExecutor, model: AdaptedModel, path: Path) -> None:
    low_ranks = open_adapter(path, model)
    PackedAdapter(executor, low_ranks, Format.F32).install(executor, 0)


@pytest.mark.parametrize("case", CASES)
def test_stacked_experts_are_as_merged_weights(case: str, tmp_path: Path) -> None:
    model, merged = saved(tmp_path, case, parameters=STACKS)
    executor = EXECUTORS["core"](model.spec, model.weights)
    install(executor, model, tmp_path / "adapter")
    expected, base = reference(merged), logits_of(executor, -1)
    np.testing.assert_allclose(logits_of(executor), expected, atol=5e-4)
    assert np.abs(expected - base).max() > 0.1


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("parameters", [STACKS, STACKS[1:]])
def test_separate_experts_are_as_merged_weights(
    case: str, parameters: tuple[str, ...], tmp_path: Path
) -> None:
    model, merged = saved(tmp_path, case, parameters=parameters)
    mixture = model.spec.layers[-1].mixture
    assert mixture is not None
    separately(tmp_path / "adapter", NAMES[case], mixture.num_experts)
    executor = EXECUTORS["core"](model.spec, model.weights)
    install(executor, model, tmp_path / "adapter")
    np.testing.assert_allclose(logits_of(executor), reference(merged), atol=5e-4)


def test_workers_have_the_factors_of_their_experts(tmp_path: Path) -> None:
    model, merged = saved(tmp_path, "qwen2_moe", parameters=STACKS)
    team = Team(model.spec, model.weights, 2, num_pages=8, page_tokens=16)
    try:
        shares = shards(model.spec, model.weights, 2)
        for executor, shard in zip(team.executors, shares, strict=True):
            own = dataclasses.replace(model, shard=shard)
            install(executor, own, tmp_path / "adapter")
        np.testing.assert_allclose(logits_of(team), reference(merged), atol=5e-4)
    finally:
        team.close()


def test_router_and_strange_stack_are_refused(tmp_path: Path) -> None:
    model, _ = saved(tmp_path, "qwen3_moe", parameters=STACKS)
    other = dataclasses.replace(model, spec=open_dense(tmp_path))
    with pytest.raises(AdapterRefused, match=r"is a stack of experts, which no adapter can"):
        open_adapter(tmp_path / "adapter", other)
    write_adapter(tmp_path / "routed", tiny_mixture("qwen3_moe"), 1, targets=("gate",))
    with pytest.raises(AdapterRefused, match=r"mlp\.gate is a router"):
        open_adapter(tmp_path / "routed", model)


def test_projections_of_altup_are_refused(tmp_path: Path) -> None:
    model = tiny_gemma("gemma3n_text")
    model.save_pretrained(tmp_path / "model")
    write_adapter(tmp_path / "adapter", model, 1, targets=("prediction_coefs",))
    opened = open_model(tmp_path / "model")
    own = AdaptedModel(opened.spec, opened.weights, is_gguf=False, max_rank=8)
    with pytest.raises(AdapterRefused, match=r"prediction_coefs is of AltUp, which adapters"):
        open_adapter(tmp_path / "adapter", own)


def open_dense(folder: Path) -> DecoderSpec:
    """Return the spec of a model without experts."""
    random_model("llama", TINY).save_pretrained(folder / "dense")
    return open_model(folder / "dense").spec


@pytest.mark.parametrize("is_transposed", [False, True])
def test_square_stack_is_as_another_one_tells(is_transposed: bool) -> None:
    stacks = ExpertStacks(num_experts=2, hidden_size=8, intermediate_size=8, alternates=False)
    rng = np.random.default_rng(0)

    def factors(rows: int, columns: int) -> Factors:
        a, b = rng.random((2, columns), np.float32), rng.random((rows, 2), np.float32)
        return Factors(StoredTensor.of(a), StoredTensor.of(b))

    down = {"experts.down_proj": factors(8, 8)}
    gate_up = {"experts.gate_up_proj": factors(*((8, 16) if is_transposed else (16, 8)))}
    found = of_parameters(down | gate_up, stacks)["experts.down_proj[1]"]
    given = down["experts.down_proj"]
    assert found.a is not None and given.a is not None
    a, b = given.a.to_float32()[1:], given.b.to_float32()[:, 1:]
    expected = (b @ a).T if is_transposed else b @ a
    np.testing.assert_array_equal(found.b.to_float32() @ found.a.to_float32(), expected)
    with pytest.raises(AdapterRefused, match="no other stack tells whether they are transposed"):
        of_parameters(down, stacks)
