"""EAGLE-3's layer drafts what it does in torch, from what the model's steps leave in its pages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_models import HEAD_SIZE, TAPPED, VOCAB_SIZE, save_eagle
from safetensors.torch import load_file, save_file

from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.eagle_executor import EagleExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.eagle import open_eagle, tapped_layers
from headrace.engine_proc.worker.models.model import open_model
from headrace.errors import ModelError

TOKENS = [17, 3, 94, 55, 8, 61, 42, 7, 23, 88, 31, 12, 77, 50, 2, 9, 63, 64, 11, 90]
DRAFT = 33  # whatever is drafted behind them


class Text:
    """A text in the core, which is computed by a model and drafted behind by EAGLE-3's layer."""

    def __init__(self, model: Path, folder: Path, tokens: list[int]) -> None:
        ours = open_model(model)
        layer, token_ids = open_eagle(folder, ours)
        options: dict[str, Any] = {"num_pages": 4, "page_tokens": 16, "threads": 2}
        self._model = CpuExecutor(ours.spec, ours.weights, **options)
        drafter = CpuExecutor(layer.spec, layer.weights, **options)
        self._model.be_drafted_by(drafter)
        self._layer = EagleExecutor(drafter, token_ids, ours.spec.vocab_size)
        self._tokens = tokens

    def batch(self, start: int, end: int, first_row: int) -> Batch:
        return Batch(
            token_ids=np.array(self._tokens[start:end], np.int32),
            positions=np.arange(start, end, dtype=np.int32),
            sequences=np.zeros(end - start, np.int32),
            page_table=np.array([[2, 0, 3]], np.int32),
            logit_rows=np.arange(first_row, end - start, dtype=np.int32),
        )

    def compute(self, start: int, end: int) -> None:
        """Do as a step of the model."""
        self._model.logits(self.batch(start, end, 0))

    def draft(self, start: int, end: int, draws: bool = True) -> Floats:
        """Return the logits of a draft's step: behind its last token, or none."""
        first_row = end - start - 1 if draws else end - start
        return self._layer.logits(self.batch(start, end, first_row)).rows.copy()


@pytest.mark.parametrize("norms_residual", [False, True])
def test_layer_drafts_as_in_torch(norms_residual: bool, tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "eagle"
    reference = save_eagle(model, folder, norms_residual=norms_residual)
    text = Text(model, folder, [*TOKENS, DRAFT])
    count = len(TOKENS)
    with torch.inference_mode():
        hidden = reference.hidden(TOKENS)
        logits, states = reference.drafted(TOKENS, hidden[:-1])
        known = torch.cat([hidden[:-1], states[-1:]])
        further, _ = reference.drafted([*TOKENS, DRAFT], known)
    text.compute(0, count - 1)
    for ours, theirs in (
        (text.draft(1, count), logits[-1:]),
        (text.draft(count, count + 1), further[-1:]),
    ):
        torch.testing.assert_close(torch.from_numpy(ours), theirs, atol=1e-3, rtol=1e-3)
    assert np.isfinite(ours).sum() == HEAD_SIZE
    assert (further[-1] - logits[-1])[reference.token_ids].abs().max() > 0.1


def test_drafts_of_a_layer_do_not_depend_on_chunks(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "eagle"
    save_eagle(model, folder)
    whole, chunked = Text(model, folder, TOKENS), Text(model, folder, TOKENS)
    count = len(TOKENS)
    whole.compute(0, count - 1)
    for start, end in ((0, 5), (5, 17), (17, count - 1)):
        chunked.compute(start, end)
    chunked.draft(1, 9, draws=False)
    chunked.draft(9, count - 1, draws=False)
    assert np.array_equal(chunked.draft(count - 1, count), whole.draft(1, count))


def test_drafts_change_nothing_that_a_model_computes(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "eagle"
    save_eagle(model, folder)
    ours, text = open_model(model), Text(model, folder, TOKENS)
    alone = CpuExecutor(ours.spec, ours.weights, num_pages=4, page_tokens=16, threads=2)
    batch = text.batch(0, len(TOKENS), 0)
    expected = alone.logits(batch).rows.copy()
    assert np.array_equal(text._model.logits(batch).rows, expected)
    text.draft(1, len(TOKENS))
    assert np.array_equal(text._model.logits(batch).rows, expected)


def no_fc(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["fc.weight"]
    save_file(tensors, path)


def no_table(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["d2t"]
    save_file(tensors, path)


def short_table(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"] = tensors["d2t"].to(torch.int16)
    save_file(tensors, path)


def wrong_table(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"] = tensors["d2t"] + VOCAB_SIZE
    save_file(tensors, path)


def with_fields(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


@pytest.mark.parametrize(
    "fields",
    [
        {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False},
        {"sliding_window": 512, "use_sliding_window": False},
        {"rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default"}},
    ],
    ids=["qwen3", "gemma3", "qwen3_vl"],
)
def test_configs_made_of_other_models_are_read(fields: dict[str, Any], tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "eagle"
    save_eagle(model, folder)
    ours = open_model(model)
    expected = open_eagle(folder, ours)[0].spec
    with_fields(**fields)(folder)
    assert open_eagle(folder, ours)[0].spec == expected


def test_a_layer_without_a_head_has_the_model_s(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "eagle"
    save_eagle(model, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    save_file(tensors, path)
    with_fields(draft_vocab_size=None, tie_word_embeddings=True)(folder)
    ours = open_model(model)
    layer, token_ids = open_eagle(folder, ours)
    head, expected = layer.weights["head"].stored(), ours.weights["head"].stored()
    assert np.array_equal(head.data, expected.data)
    assert list(token_ids) == list(range(VOCAB_SIZE))


def test_a_table_of_other_integers_is_read(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "eagle"
    save_eagle(model, folder)
    _, expected = open_eagle(folder, open_model(model))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"d2t": tensors["d2t"].to(torch.int32)}, path)
    assert np.array_equal(open_eagle(folder, open_model(model))[1], expected)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (no_fc, "no tensor 'fc.weight'"),
        (no_table, "no tensor 'd2t'"),
        (short_table, "d2t has numbers of the type I16; I64 and I32 are read"),
        (wrong_table, f"tokens beyond the model's {VOCAB_SIZE}"),
        (with_fields(hidden_size=32), "a hidden size of 32; the model has 128 and 64"),
        (with_fields(num_hidden_layers=2), "has 2 layers"),
        (with_fields(draft_vocab_size=50), r"'lm_head.weight' has shape \[40, 64\]"),
        (with_fields(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}), "4 layers"),
    ],
)
def test_folder_for_another_model_is_refused(
    change: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    model, folder = tmp_path / "model", tmp_path / "eagle"
    save_eagle(model, folder)
    change(folder)
    with pytest.raises(ModelError, match=f"{folder}: .*{why}"):
        open_eagle(folder, open_model(model))


def test_layers_that_a_config_does_not_name_are_the_usual_ones() -> None:
    assert tapped_layers({}, 32) == (2, 16, 29)
    assert tapped_layers({"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, 32) == (2, 16, 29)
    named = [layer - 1 for layer in TAPPED]
    own = {"eagle_aux_hidden_state_layer_ids": named}
    assert tapped_layers({"eagle_config": own}, 4) == TAPPED
