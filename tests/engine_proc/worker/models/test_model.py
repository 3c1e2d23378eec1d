"""Models opened from GGUF execute as transformers does; files that do not fit are refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf_twins import tiny_model, write_gguf
from safetensors.torch import load_file, save_file

from headrace.engine_proc.worker.checkpoints import file_order
from headrace.engine_proc.worker.checkpoints.mapped_file import MappedFile
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor
from headrace.errors import ModelError

PROMPT = [17, 3, 94, 55, 8, 61, 42, 7, 23, 88, 31, 12]
Floats = npt.NDArray[np.float32]


def execute(path: Path) -> Floats:
    """Return the logits of the whole prompt, run in two chunks."""
    model = open_model(path)
    executor = TorchExecutor(model.spec, model.weights, num_pages=4, page_tokens=4)
    logits = []
    for start, stop in itertools.pairwise([0, 7, len(PROMPT)]):
        rows = np.arange(stop - start, dtype=np.int32)
        tokens = np.array(PROMPT[start:stop], np.int32)
        pages = np.array([[3, 0, 1]], np.int32)
        logits.append(executor.forward(Batch(tokens, rows + start, rows * 0, pages, rows)))
    return np.concatenate(logits)


def reference(model: Any) -> Floats:
    with torch.inference_mode():
        logits: Floats = model(torch.tensor([PROMPT])).logits[0].numpy()
    return logits


def test_the_token_of_the_file_ends_a_text(tmp_path: Path) -> None:
    assert open_model(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))).eos_ids == (5,)


def test_llama3_rope_comes_as_a_tensor_of_divisors(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        **scaling,
    }
    model = tiny_model("llama", rope_parameters=rope)
    unscaled = 1 / 1e4 ** (np.arange(0, 16, 2) / 16)
    divisors = (unscaled / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() > 1.5
    path = write_gguf(tmp_path / "tiny.gguf", model, extra={"rope_freqs.weight": divisors})
    np.testing.assert_allclose(execute(path), reference(model), atol=2e-5, rtol=0)


def test_a_split_gguf_executes_as_a_whole_one(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    write_gguf(tmp_path / "tiny.gguf", model, split_max_tensors=7)
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(parts) > 2
    whole = write_gguf(tmp_path / "whole.gguf", model)
    np.testing.assert_array_equal(execute(parts[1]), execute(whole))


def test_files_larger_than_half_of_memory_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    bypass_cache = MappedFile.bypass_cache
    bypassed: list[Path] = []
    logits: list[Floats] = []

    def bypass(file: MappedFile) -> None:
        bypassed.append(file.path)
        bypass_cache(file)

    monkeypatch.setattr(MappedFile, "bypass_cache", bypass)
    for limit, seen in ((1 << 40, []), (path.stat().st_size, [path])):
        monkeypatch.setattr(file_order, "memory_limit", lambda limit=limit: limit)
        model = open_model(path)
        executor = CpuExecutor(model.spec, model.weights, num_pages=1, page_tokens=16)
        rows = np.arange(len(PROMPT), dtype=np.int32)
        tokens, page = np.array(PROMPT, np.int32), np.zeros((1, 1), np.int32)
        logits.append(executor.forward(Batch(tokens, rows, rows * 0, page, rows)))
        assert bypassed == seen
    np.testing.assert_array_equal(logits[0], logits[1])


def test_gguf_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.model_type = "rwkv7"
    path = write_gguf(tmp_path / "tiny.gguf", model)
    with pytest.raises(ModelError, match=r"tiny\.gguf: architecture 'rwkv7' is not supported"):
        open_model(path)


def saved_with(folder: Path, tensors: dict[str, torch.Tensor | None]) -> Path:
    """Save a tiny Llama with some tensors replaced, added, or left out."""
    tiny_model("llama").save_pretrained(folder)
    path = folder / "model.safetensors"
    changed = {**load_file(path), **tensors}
    save_file({name: t for name, t in changed.items() if t is not None}, path)
    return folder


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        ("model.norm.weight", None, "tensor 'model.norm.weight' is missing"),
        ("lm_head.weight", None, "tensor 'lm_head.weight' is missing"),
        (
            "model.layers.1.mlp.up_proj.weight",
            torch.ones(64, 80),
            r"up_proj.weight' has shape \[64, 80\], but a llama model .* has \[80, 64\]",
        ),
        (
            "model.layers.0.self_attn.q_proj.bias",
            torch.ones(64),
            "q_proj.bias' is not part of a llama model of this config",
        ),
        (
            "model.layers.2.input_layernorm.weight",
            torch.ones(64),
            "layers.2.input_layernorm.weight' is not part of",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(
    name: str, tensor: torch.Tensor | None, complaint: str, tmp_path: Path
) -> None:
    folder = saved_with(tmp_path, {name: tensor})
    with pytest.raises(ModelError, match=complaint) as refused:
        open_model(folder)
    assert str(tmp_path) in str(refused.value)


def test_rope_frequencies_stored_by_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    open_model(
        saved_with(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )


def test_a_tied_head_may_be_stored_but_not_differ(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    copy = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": copy}, path)
    assert "head" not in open_model(tmp_path).weights
    save_file({**tensors, "lm_head.weight": copy + 1}, path)
    with pytest.raises(ModelError, match=r"'lm_head\.weight' is not part"):
        open_model(tmp_path)


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert open_model(tmp_path).eos_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert open_model(tmp_path).eos_ids == (9,)


def test_a_path_that_is_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf file"):
        open_model(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        open_model(tmp_path)
