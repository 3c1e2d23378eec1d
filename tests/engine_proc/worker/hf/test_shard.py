"""Models that run in transformers say the same when several workers share them, here threads."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_configs import execution_config

from headrace.engine_proc.collectives.collectives import CollectiveFailed, CollectiveOutcome
from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.hf.check import check
from headrace.engine_proc.worker.hf.executor import TransformersExecutor
from headrace.engine_proc.worker.hf.model import TransformersModel
from headrace.engine_proc.worker.hf.shard import take_share
from headrace.engine_proc.worker.model_opener import open_for
from headrace.errors import ModelError
from headrace.exit_status import ExitStatus

MAX_MODEL_LEN = 64
NUM_TOKENS = 20
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
# Uneven heads; experts; fused rows, biases, ropes of a part; norms over all heads; gathered rows.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {},
    "gpt_neox": {"hidden_size": 96},
    "phi": {"hidden_size": 96},
    "olmo2": {},
    "glm4": {"tie_word_embeddings": True},
}


@pytest.fixture
def groups(num_ranks: int) -> Iterator[list[ShmAllReduce]]:
    """The ranks of a group."""
    fd = ShmAllReduce.create(num_ranks)
    joined = [ShmAllReduce(fd, rank, num_ranks) for rank in range(num_ranks)]
    os.close(fd)
    yield joined
    for group in joined:
        group.close()


def save(folder: Path, model_type: str, **differences: Any) -> None:
    """Save a small random model."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **TINY | differences)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)


def open_it(folder: Path) -> TransformersModel:
    model = open_for(
        execution_config(folder, model_impl="transformers", max_model_len=MAX_MODEL_LEN)
    )
    assert isinstance(model, TransformersModel)
    return model


def logits_of(model: TransformersModel) -> Floats:
    """Return the logits of a text."""
    executor = TransformersExecutor(model, num_pages=8, page_tokens=4)
    numbers = np.arange(NUM_TOKENS, dtype=np.int32)
    text = (7 * numbers + 3) % TINY["vocab_size"]
    pages = np.arange(5, dtype=np.int32)[None]
    return executor.forward(Batch(text, numbers, np.zeros_like(numbers), pages, numbers))


def in_turn(groups: list[ShmAllReduce], run: Callable[[ShmAllReduce], Any]) -> list[Any]:
    """Return what all ranks bring; one that fails ends the others."""

    def body(group: ShmAllReduce) -> Any:
        try:
            return run(group)
        except Exception:
            group.abort()
            raise

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(body, groups))


@pytest.mark.parametrize("num_ranks", [2, 4])  # fewer and more than KV heads
@pytest.mark.parametrize("family", FAMILIES)
def test_a_team_says_what_one_worker_says(
    family: str, groups: list[ShmAllReduce], tmp_path: Path
) -> None:
    save(tmp_path, family, **FAMILIES[family])
    models = [open_it(tmp_path) for _ in groups]
    num_numbers = sum(p.numel() for p in models[0].module.parameters())
    expected = logits_of(models[0])

    def run(group: ShmAllReduce) -> Floats:
        cut = partial(take_share, group=group, max_model_len=MAX_MODEL_LEN)
        models[group.rank] = check(models[group.rank], cut)
        return logits_of(models[group.rank])

    first, *others = in_turn(groups, run)
    np.testing.assert_allclose(first, expected, atol=1e-4)
    for other in others:
        np.testing.assert_array_equal(other, first)
    for model in models:
        assert sum(p.numel() for p in model.module.parameters()) < 0.75 * num_numbers


@pytest.mark.parametrize("num_ranks", [2])
@pytest.mark.parametrize(
    ("family", "plan", "text"),
    [
        ("gpt2", {}, "GPT2LMHeadModel has no plan for tensor parallelism in transformers; use -"),
        (
            "mixtral",
            {"model.layers.*.self_attn": "local_params"},
            "self_attn as 'local_params'; use",
        ),
        (
            "mixtral",
            {"model.norm": "colwise"},
            "its plan for .* has model.norm as 'colwise'; use --tp 1",
        ),
        (
            "mixtral",
            {"model.layers.*.mlp.gate.weight": "colwise"},
            "mlp.gate.weight as 'colwise'; use",
        ),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(
    family: str,
    plan: dict[str, str],
    text: str,
    groups: list[ShmAllReduce],
    tmp_path: Path,
) -> None:
    save(tmp_path, family, hidden_size=96)
    model = open_it(tmp_path)
    model.module._tp_plan = {**model.module.tp_plan, **plan}
    groups[1].abort()  # whoever got so far would wait for it
    with pytest.raises(ModelError, match=text):
        take_share(model, groups[0], MAX_MODEL_LEN)


@pytest.mark.parametrize("num_ranks", [2])
def test_lost_peer_during_loading_does_not_blame_the_model(
    groups: list[ShmAllReduce], tmp_path: Path
) -> None:
    save(tmp_path, "mixtral")
    groups[1].abort(CollectiveOutcome.PEER_DIED)
    config = execution_config(tmp_path, model_impl="transformers", max_model_len=MAX_MODEL_LEN)
    with pytest.raises(CollectiveFailed, match="rank 1 died") as failure:
        open_for(config, groups[0])
    assert failure.value.exit_status is ExitStatus.PEER_LOST


@pytest.mark.parametrize("num_ranks", [8])
def test_too_few_heads_are_refused(groups: list[ShmAllReduce], tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    groups[1].abort()
    with pytest.raises(ModelError, match="q_proj has 6 heads, too few for --tp 8"):
        take_share(open_it(tmp_path), groups[0], MAX_MODEL_LEN)
