"""A model in transformers' modules runs on our pages, and says the same."""

import dataclasses
from pathlib import Path
from typing import Any

import family_table
import numpy as np
import pytest
import torch
import transformers
from engine_configs import execution_config
from reference import endless_answers
from safetensors.torch import load_file, save_file
from tiny_vision import make_vision_folder
from transformers_cases import (
    CASES,
    EXPERTS,
    NUM_POSITIONS,
    PAGE_TOKENS,
    TEXTS,
    TINY,
    flatten,
)

from headrace.engine_proc.worker.backend_selection import TRANSFORMERS, foresee
from headrace.engine_proc.worker.hf import model as model_module
from headrace.engine_proc.worker.hf.check import check
from headrace.engine_proc.worker.hf.executor import TransformersExecutor
from headrace.engine_proc.worker.hf.hook import reach_of
from headrace.engine_proc.worker.hf.model import TransformersModel
from headrace.engine_proc.worker.model_opener import open_for
from headrace.engine_proc.worker.models.lowering import FAMILIES
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.reference.torch_attention import Reach
from headrace.errors import ModelError

NUM_TOKENS = 6
# Of experts, latents, sinks, windows and positions one each; `make families` has all.
FEW = ("qwen3_moe", "deepseek_v3", "gpt_oss", "gpt2", "gpt_neox", "starcoder2")


def save_tiny(folder: Path, model_type: str, **differences: Any) -> Any:
    """Save a random model of a family, and return it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **TINY | differences)
    generates = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto_class: Any = transformers.AutoModelForCausalLM if generates else transformers.AutoModel
    model = auto_class.from_config(config, dtype=torch.float32)
    model.eval().save_pretrained(folder)
    return model


def open_it(
    folder: Path, impl: str = "auto", dtype: str = "auto"
) -> DecoderModel | TransformersModel:
    return open_for(
        execution_config(folder, model_impl=impl, dtype=dtype, max_model_len=NUM_POSITIONS)
    )


def greedy(model: TransformersModel, chunk: int) -> list[list[int]]:
    """Continue all texts, at most `chunk` tokens of each in a step: prompts join decodes."""
    executor = TransformersExecutor(model, num_pages=15, page_tokens=PAGE_TOKENS)
    texts, done = [list(text) for text in TEXTS], [0] * len(TEXTS)
    wanted = [len(text) + NUM_TOKENS for text in TEXTS]
    while any(len(text) < end for text, end in zip(texts, wanted, strict=True)):
        parts = [
            (s, done[s], text[done[s] : done[s] + chunk])
            for s, text in enumerate(texts)
            if len(text) < wanted[s]
        ]
        for (s, start, tokens), logits in zip(parts, executor.forward(flatten(parts)), strict=True):
            done[s] = start + len(tokens)
            if done[s] == len(texts[s]):
                texts[s].append(int(logits.argmax()))
    return [text[-NUM_TOKENS:] for text in texts]


@pytest.mark.parametrize("model_type", CASES if family_table.WRITES else FEW)
def test_greedy_text_is_that_of_transformers(model_type: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, model_type, **CASES[model_type])
    model = open_it(tmp_path, "transformers")
    assert isinstance(model, TransformersModel)
    texts = endless_answers(reference, TEXTS, NUM_TOKENS)
    assert len({token for text in texts for token in text}) > 3
    found = {
        way: greedy(model, chunk) == texts for way, chunk in (("batched", 100), ("chunked", 4))
    }
    if model_type not in FAMILIES:
        family_table.record(model_type, family_table.MODULES, found)
    assert found == {"batched": True, "chunked": True}


def test_table_has_the_families_that_modules_are_tested_with() -> None:
    rows = {name for name, (where, *_) in family_table.rows().items() if where == "modules"}
    assert rows == CASES.keys() - FAMILIES.keys(), "run `make families`"


def test_bfloat16_is_kept_unless_float32_is_asked_for(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2").to(torch.bfloat16).save_pretrained(tmp_path)
    dtypes = {}
    for dtype in ("auto", "float32"):
        model = open_it(tmp_path, dtype=dtype)
        assert isinstance(model, TransformersModel)
        dtypes[dtype] = model.module.dtype
    assert dtypes == {"auto": torch.bfloat16, "float32": torch.float32}


def test_dummy_weights_of_modules_need_no_files(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2")
    (tmp_path / "model.safetensors").unlink()
    config = execution_config(tmp_path, load_format="dummy", max_model_len=NUM_POSITIONS)
    assert foresee(config).executor == TRANSFORMERS
    first, second = open_for(config), open_for(config)
    assert isinstance(first, TransformersModel) and isinstance(second, TransformersModel)
    assert first.module.dtype == torch.float32  # as the config says
    assert greedy(first, chunk=4) == greedy(second, chunk=100)


def test_keys_and_values_may_be_rounded(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2")
    model = open_it(tmp_path)
    assert isinstance(model, TransformersModel)
    assert model.page_bytes(PAGE_TOKENS, "bfloat16") == 2 * 2 * 64 * 2 * PAGE_TOKENS
    batch = flatten([(0, 0, TEXTS[0])])
    logits = {
        dtype: TransformersExecutor(
            model, num_pages=15, page_tokens=PAGE_TOKENS, kv_dtype=dtype
        ).forward(batch)
        for dtype in ("float32", "bfloat16")
    }
    difference = np.abs(logits["bfloat16"] - logits["float32"]).max()
    assert 0 < difference < 0.05 * np.abs(logits["float32"]).max()


def test_hidden_states_are_those_the_head_sees(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "gpt_neox")
    model = open_it(tmp_path, "transformers")
    assert isinstance(model, TransformersModel)
    executor = TransformersExecutor(model, num_pages=15, page_tokens=PAGE_TOKENS)
    vectors = executor.embed(flatten([(s, 0, text) for s, text in enumerate(TEXTS)]))
    with torch.inference_mode():
        hidden = [
            reference.base_model(torch.tensor([text])).last_hidden_state[0, -1] for text in TEXTS
        ]
    np.testing.assert_allclose(vectors, torch.stack(hidden).numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "differences", "named"),
    [
        ("t5", {}, "a t5 model is an encoder and a decoder"),
        ("mamba", {}, "a mamba model has state-space"),
        ("jamba", EXPERTS, "a jamba model has state-space"),
        ("minimax", EXPERTS | {"head_dim": 16}, "1 of the 2 layers of MiniMaxForCausalLM use"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "0 of the 2 layers of BloomForCausalLM use"),
        ("falcon", {"alibi": True}, "its attention is of its own kind"),
        (
            "llama4_text",
            EXPERTS
            | {"attention_chunk_size": 8, "head_dim": 16, "intermediate_size_mlp": 80}
            | {"no_rope_layers": [1, 0]},
            "neither causal, nor full, nor a sliding window",
        ),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True, "head_dim": 16},
            "sees tokens to come",
        ),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                },
                "original_max_position_embeddings": 32,
            },
            "--max-model-len 32 or less",
        ),
        ("vit", {}, "a vit model does not generate text"),
    ],
)
def test_what_pages_cannot_hold_is_refused_by_name(
    model_type: str, differences: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, model_type, **differences)
    with pytest.raises(ModelError) as refused:
        open_it(tmp_path, impl="transformers")
    assert named in str(refused.value)
    assert str(refused.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_a_model_that_takes_images_is_said_to_be_one(family: str, tmp_path: Path) -> None:
    make_vision_folder(tmp_path, family)
    with pytest.raises(ModelError, match=rf"a {family} model takes images; .*\(--model-impl\)"):
        open_it(tmp_path, impl="transformers")


def test_our_own_modules_come_first_by_default(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    assert isinstance(open_it(tmp_path), DecoderModel)
    assert isinstance(open_it(tmp_path, impl="headrace"), DecoderModel)
    assert isinstance(open_it(tmp_path, impl="transformers"), TransformersModel)


def test_where_both_refuse_both_reasons_are_given(tmp_path: Path) -> None:
    save_tiny(tmp_path, "mamba")
    with pytest.raises(
        ModelError, match=r"'mamba' is not supported .*; nor can transformers run it: a mamba"
    ):
        open_it(tmp_path)
    with pytest.raises(ModelError, match="'mamba' is not supported") as refused:
        open_it(tmp_path, impl="headrace")
    assert "transformers" not in str(refused.value)


def test_model_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2")
    config = (tmp_path / "config.json").read_text().replace('"gpt2"', '"gpt99"')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=r"'gpt99' is not supported.*gpt99.* not recognize"):
        open_it(tmp_path)


def test_a_gguf_file_is_not_for_transformers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tiny\.gguf: only folders can be run"):
        open_it(tmp_path / "tiny.gguf", impl="transformers")


def test_config_refused_by_transformers_keeps_its_reason(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2")
    config = (tmp_path / "config.json").read_text().replace('"n_embd": 64', '"n_embd": "64"')
    (tmp_path / "config.json").write_text(config)
    says = r"run it: Validation error for field 'n_embd': TypeError: .* expected int, got str"
    with pytest.raises(ModelError, match=says) as refused:
        open_it(tmp_path)
    assert "\n" not in str(refused.value)


NORM = "transformer.h.1.ln_1.weight"


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (None, f"tensor '{NORM}' is missing"),
        (torch.ones(48), rf"tensor '{NORM}' has shape \[48\], but a gpt2 model .* has \[64\]"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(
    tensor: torch.Tensor | None, complaint: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors"
    tensors = {**load_file(path), NORM: tensor}
    save_file({n: t for n, t in tensors.items() if t is not None}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=complaint):
        open_it(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated: tensor '"):
        open_it(tmp_path)


def test_the_check_notices_a_layer_that_sees_too_little(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2")
    model = open_it(tmp_path)
    assert isinstance(model, TransformersModel)
    short = {
        module: dataclasses.replace(layer, reach=Reach(before=1))
        for module, layer in model.layers.items()
    }
    with pytest.raises(ModelError, match=r"differs by .* from itself"):
        check(TransformersModel(model.module, short, None))


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


MASKS: dict[str, tuple[Any, Reach | None]] = {
    "causal": (causal, Reach(None, 0)),
    "full": (lambda b, h, q, k: q >= 0, Reach(None, None)),
    "sliding": (lambda b, h, q, k: (k <= q) & (k > q - 5), Reach(4, 0)),
    "sliding to both sides": (lambda b, h, q, k: (k - q).abs() <= 3, Reach(3, 3)),
    "a window as long as the text": (lambda b, h, q, k: (k <= q) & (k > q - 64), Reach(None, 0)),
    "chunks": (lambda b, h, q, k: (k <= q) & (k // 16 == q // 16), None),
    "a prefix that sees itself": (lambda b, h, q, k: (k <= q) | (k < 10), None),
    "a window with a first token": (lambda b, h, q, k: (k <= q) & ((k > q - 5) | (k == 0)), None),
    "every second": (lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0), None),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_a_reach_or_refused(name: str) -> None:
    mask, reach = MASKS[name]
    if reach is not None:
        assert reach_of(mask, NUM_POSITIONS) == reach
    else:
        with pytest.raises(ModelError, match="neither causal, nor full, nor a sliding window"):
            reach_of(mask, NUM_POSITIONS)


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "num_threads"), [(6, 1, 6), (6, 2, 3), (1, 2, 1)]
)
def test_modules_run_on_all_cores_that_are_granted(
    num_cores: int,
    num_ranks: int,
    num_threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_tiny(tmp_path, "phi")
    monkeypatch.setattr(model_module, "usable_cores", lambda: num_cores)
    before = torch.get_num_threads()
    try:
        model_module.open_config(tmp_path, num_ranks)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
