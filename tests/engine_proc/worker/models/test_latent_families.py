"""Every family with latent attention, lowered, generates the text of transformers, whatever its
sequences go through: batch mates, chunks, cached prefixes, preemptions, retries and deaths."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import gguf_latents
import numpy as np
import pytest
import torch
from decoder_cases import answers_of
from generation import NUM_TOKENS, PROMPTS
from gguf_twins import write_gguf
from latent_models import LATENT, tiny_latent
from reference import endless_answers
from safetensors.torch import load_file, save_file

from headrace.config.model_card import read_folder
from headrace.engine_proc.worker.execution.executor import Executor
from headrace.engine_proc.worker.models.families.latent import LATENT as FAMILIES
from headrace.engine_proc.worker.models.lowering import lower_config
from headrace.engine_proc.worker.models.model import open_model
from headrace.errors import ModelError

Make = Callable[..., Executor]
Answers = list[list[int]]


GGUF: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "deepseek_v2": {},
    "deepseek_v2 with groups": {"mlp_bias": False},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "youtu": {},
}


@pytest.mark.parametrize("case", GGUF)
def test_gguf_files_of_latents_generate_the_same(case: str, tmp_path: Path) -> None:
    model = tiny_latent(case, **GGUF[case])
    path = write_gguf(tmp_path / "tiny.gguf", model)
    assert answers_of(path) == endless_answers(model, PROMPTS, NUM_TOKENS)


def test_older_gguf_files_of_latents_generate_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of a head are rows of one tensor, and there are heads of them."""
    monkeypatch.setattr(gguf_latents, "tensors", lambda name, numbers, config: [(name, numbers)])
    keys = {
        "attention.head_count_kv": 4,
        "attention.key_length": 24 + 16,
        "attention.value_length": 32,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }
    model = tiny_latent("deepseek_v3")
    path = write_gguf(tmp_path / "tiny.gguf", model, keys=keys)
    assert answers_of(path) == endless_answers(model, PROMPTS, NUM_TOKENS)


def test_gguf_names_of_latents_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """The converter's own table has the names that the files of these tests have."""
    model = tiny_latent("deepseek_v3")
    path = write_gguf(tmp_path / "tiny.gguf", model)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, model.config.num_hidden_layers)
    names = {
        table.get_name(own.removesuffix(".weight").removesuffix("_bias"))
        for name in model.state_dict()
        if ".experts." not in name
        for own, _ in gguf_latents.tensors(name, np.zeros((4 * 56, 32), np.float32), model.config)
    }
    stored = {
        tensor.name.removesuffix(".weight").removesuffix(".bias")
        for tensor in gguf.GGUFReader(path).tensors
        if "_exps" not in tensor.name
    }
    assert names == stored


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"attention.kv_lora_rank": 33}, "'attention.kv_lora_rank': 33, not a multiple of 16"),
        ({"attention.key_length_mla": 16}, "'rope.dimension_count': 16, not less than the 16"),
        ({"attention.value_length_mla": 16}, r"'blk.0.attn_v_b.weight' has shape \[128, 32\]"),
        ({"attention.kv_lora_rank": 48}, r"'blk.0.attn_kv_a_mqa.weight' has shape \[48, 64\]"),
        ({"attention.head_count": 8}, r"'blk.0.attn_q_b.weight' has shape \[160, 48\]"),
        ({"expert_gating_func": 3}, "'expert_gating_func': 3, not 1"),
    ],
)
def test_keys_of_latents_that_do_not_fit_are_named(
    keys: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_latent("deepseek_v3"), keys=keys)
    with pytest.raises(ModelError, match=complaint):
        open_model(path)


def test_published_fields_of_latents_change_nothing() -> None:
    """As config.json of DeepSeek V3 and of GLM-5 have them, beside what they share."""
    published: dict[str, dict[str, Any]] = {
        "deepseek_v3": {
            "ep_size": 1,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        "glm_moe_dsa": {
            "indexer_rope_interleave": True,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
    }
    for case, fields in published.items():
        config = tiny_latent(case).config.to_dict()
        config.pop("quantization_config", None)
        assert lower_config(config | fields) == lower_config(config)


def test_kimi_k2_is_deepseek_v3_by_another_name() -> None:
    config = tiny_latent("deepseek_v3").config.to_dict()
    spec = lower_config(config | {"model_type": "kimi_k2"})
    assert replace(spec, architecture="deepseek_v3") == lower_config(config)


def test_fp8_blocks_of_keys_and_values_are_transposed_right(tmp_path: Path) -> None:
    """Blocks of 32 rows and 16 columns, where heads have 24 and 32 rows."""
    model = tiny_latent("deepseek_v3")
    model.save_pretrained(tmp_path)
    path, config_path = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, decoded = load_file(path), model.state_dict()
    for name in [name for name in tensors if name.endswith("kv_b_proj.weight")]:
        codes = (torch.randn(4 * 56, 32) * 40).to(torch.float8_e4m3fn)
        scales = 0.001 * (1 + torch.rand(7, 2))
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        decoded[name] = codes.float() * scales.repeat_interleave(32, 0).repeat_interleave(16, 1)
    model.load_state_dict(decoded)
    save_file(tensors, path)
    settings = {"quant_method": "fp8", "weight_block_size": [32, 16]}
    config = json.loads(config_path.read_text()) | {"quantization_config": settings}
    config_path.write_text(json.dumps(config))
    assert answers_of(tmp_path) == endless_answers(model, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("case", ["deepseek_v32", "glm_moe_dsa"])
def test_texts_end_where_sparse_attention_begins(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_latent(case).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_model(tmp_path).spec.max_position == 128
    caplog.set_level("INFO")
    assert read_folder(tmp_path).max_model_len == 128
    assert "at most 128 tokens" in caplog.text


@pytest.mark.parametrize("name", ["kv_lora_rank", "qk_rope_head_dim", "v_head_dim"])
def test_latents_of_odd_sizes_are_left_to_modules(name: str) -> None:
    config = tiny_latent("youtu").config.to_dict() | {name: 24}
    with pytest.raises(ModelError, match=f"'{name}': 24, not a multiple of 16"):
        lower_config(config)


def test_every_family_of_latents_has_a_case() -> None:
    tested = {case.split()[0] for case in LATENT}
    assert tested | {"kimi_k2", "kimi_linear"} == set(FAMILIES)
