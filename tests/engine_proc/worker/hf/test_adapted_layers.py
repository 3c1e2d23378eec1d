"""Adapters of transformers' modules say what the same model says with them merged."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import peft_folders
import pytest
import torch
from engine_configs import execution_config
from random_models import random_model
from safetensors.torch import load_file, save_file
from transformers_cases import CASES, NUM_POSITIONS, PAGE_TOKENS, TEXTS, TINY, flatten

from headrace.engine_proc.worker.adapters.factors import AdapterRefused
from headrace.engine_proc.worker.execution.executor import Floats
from headrace.engine_proc.worker.hf.adapted_layers import AdaptedLayers
from headrace.engine_proc.worker.hf.executor import TransformersExecutor
from headrace.engine_proc.worker.hf.model import TransformersModel, open_transformers
from headrace.engine_proc.worker.loader import adapted_layers
from headrace.errors import ConfigError

TOLERANCE = 2e-4  # of logits of about 10


class Adapted:
    """A model in transformers' modules with adapters of random factors."""

    def __init__(self, folder: Path, model_type: str, **differences: Any) -> None:
        self.base = random_model(model_type, TINY | differences)
        self.base.save_pretrained(folder / "base")
        self.model = open_base(folder)
        self.layers = AdaptedLayers(self.model, max_rank=16, dtype=None)
        self.executor = TransformersExecutor(
            self.model, num_pages=15, page_tokens=PAGE_TOKENS, adapters=self.layers
        )
        self._folder = folder
        self.merged: list[Any] = []

    def add(self, **config: Any) -> None:
        """Write an adapter and load it into the next slot."""
        slot = len(self.merged)
        folder = self._folder / f"adapter{slot}"
        self.merged.append(peft_folders.write_adapter(folder, self.base, slot + 1, **config))
        self.layers.install(slot, self.layers.pack(folder))

    def run(self, slots: list[int], chunk: int = NUM_POSITIONS) -> list[Floats]:
        """Return the logits behind each text, run with the adapters of slots."""
        column = np.array(slots, np.int32)
        logits: list[Floats] = [np.empty(0, np.float32)] * len(slots)
        for start in range(0, max(map(len, TEXTS)), chunk):
            parts = [
                (i, start, text[start : start + chunk])
                for i, text in enumerate(TEXTS[: len(slots)])
                if start < len(text)
            ]
            step = dataclasses.replace(flatten(parts), adapters=column)
            for (i, _, _), row in zip(parts, self.executor.forward(step), strict=True):
                logits[i] = row
        return logits

    def expected(self, slots: list[int]) -> list[Floats]:
        """Return what merged models say."""
        models = [self.base if slot < 0 else self.merged[slot] for slot in slots]
        with torch.inference_mode():
            return [
                model(torch.tensor([text])).logits[0, -1].numpy()
                for model, text in zip(models, TEXTS, strict=True)
            ]


def open_base(folder: Path) -> TransformersModel:
    return open_transformers(folder / "base", dtype="auto", max_model_len=NUM_POSITIONS)


def assert_same(found: list[Floats], expected: list[Floats]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [NUM_POSITIONS, 4])
@pytest.mark.parametrize("model_type", ["llama", "starcoder2", "gemma3_text", "olmoe"])
def test_rows_of_many_adapters_are_as_merged(model_type: str, chunk: int, tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, model_type, **CASES.get(model_type, {}))
    targets = peft_folders.LINEAR if model_type != "olmoe" else peft_folders.LINEAR[:4]
    adapted.add(targets=(*targets, "c_fc", "c_proj"))
    adapted.add(rank=3, targets=("v_proj", "o_proj"), use_rslora=True)
    base = adapted.run([-1, -1, -1], chunk)
    assert_same(base, adapted.expected([-1, -1, -1]))
    for slots in ([0, 1, -1], [1, 0, 0], [-1, 0, 1]):
        found = adapted.run(slots, chunk)
        assert_same(found, adapted.expected(slots))
        changed = [np.abs(own - plain).max() > 0.1 for own, plain in zip(found, base, strict=True)]
        assert changed == [slot >= 0 for slot in slots]


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_gains_of_dora_leave_biases_alone(model_type: str, tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, model_type)
    adapted.add(use_dora=True)
    assert_same(adapted.run([0, -1, 0]), adapted.expected([0, -1, 0]))


def test_head_changes_for_rows_with_logits(tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, "llama", tie_word_embeddings=False)
    adapted.add(targets=("lm_head", "q_proj"))
    adapted.add(targets=("lm_head",))
    assert_same(adapted.run([1, -1, 0]), adapted.expected([1, -1, 0]))


def test_a_slot_takes_another_adapter(tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, "llama")
    adapted.add()
    adapted.add()
    adapted.layers.install(0, adapted.layers.pack(tmp_path / "adapter1"))
    assert_same(adapted.run([0, 0, 0]), adapted.expected([1, 1, 1]))


def test_rows_do_not_depend_on_those_of_other_adapters(tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, "llama")
    adapted.add()
    adapted.add()
    np.testing.assert_array_equal(adapted.run([0, 1, 1])[0], adapted.run([0, 1, -1])[0])


@pytest.mark.parametrize(
    ("other", "config", "reason"),
    [
        ({}, {"rank": 17}, "has rank 17; --max-lora-rank is 16"),
        ({"num_hidden_layers": 3}, {}, r"layers\.2\.\S+ is no linear layer"),
        ({"intermediate_size": 96}, {}, r"is \[64, 96\] in the adapter, and \[64, 80\] in the"),
    ],
)
def test_what_does_not_fit_is_refused(
    other: dict[str, int], config: dict[str, int], reason: str, tmp_path: Path
) -> None:
    adapted = Adapted(tmp_path, "llama")
    adapted.base = random_model("llama", TINY | other)
    with pytest.raises(AdapterRefused, match=reason):
        adapted.add(**config)


@pytest.mark.parametrize(("kind", "is_taken"), [("lm_head", True), ("o_proj", False)])
def test_only_embeddings_and_heads_may_be_whole(kind: str, is_taken: bool, tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, "llama", tie_word_embeddings=False)
    adapted.add(targets=("q_proj",), modules_to_save=[kind])
    own = {
        f"base_model.model.{name}.weight": module.weight.detach() * 1.5
        for name, module in adapted.base.named_modules()
        if name.endswith(kind)
    }
    path = tmp_path / "adapter0"
    file = path / "adapter_model.safetensors"
    save_file(load_file(file) | own, file)
    if is_taken:
        assert len(adapted.layers.pack(path)) > len(own) > 0
        return
    reason = "modules_to_save has .*o_proj; only the embedding and the head can be whole"
    with pytest.raises(AdapterRefused, match=reason):
        adapted.layers.pack(path)


def test_experts_of_modules_are_refused(tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, "olmoe", **CASES["olmoe"])
    with pytest.raises(AdapterRefused, match="is a stack of experts, which no adapter can change"):
        adapted.add(parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))


def test_adapters_that_memory_lacks_are_refused(tmp_path: Path) -> None:
    random_model("llama", TINY).save_pretrained(tmp_path / "base")
    model = open_base(tmp_path)
    config = execution_config(tmp_path / "base", enable_lora=True)
    assert adapted_layers(config, model)
    huge = dataclasses.replace(config, max_loras=1 << 16, max_lora_rank=1024)
    with pytest.raises(ConfigError, match=r"65536 adapters of rank 1024 .* do not fit"):
        adapted_layers(huge, model)
    with pytest.raises(ConfigError, match="where adapters need --tp 1"):
        adapted_layers(dataclasses.replace(config, tp=2), model)
