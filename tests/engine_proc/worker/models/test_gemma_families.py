"""Gemma 3n and 4: what only they have. test_sequences.py has their texts."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from decoder_cases import answers_of, decoder_case, part_of_prompt
from gemma_models import FULL, GEMMAS, SLIDING, TINY, tiny_gemma
from generation import NUM_TOKENS, PROMPTS
from gguf_twins import write_gguf
from reference import endless_answers
from safetensors.torch import load_file, save_file
from worker_teams import Team

from headrace.engine_proc.worker.execution.cache_sizes import page_bytes
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, KVDtype, UnsupportedSpec
from headrace.engine_proc.worker.models.lowering import lower_config
from headrace.engine_proc.worker.models.model import open_model
from headrace.errors import ModelError

CONFIGS = {
    family: transformers.AutoConfig.for_model(family, **TINY | GEMMAS[family]).to_dict()
    for family in ("gemma3n_text", "gemma4_text")
}


@pytest.mark.parametrize("case", GEMMAS)
def test_chunks_change_no_bits_of_gemmas(case: str) -> None:
    made = decoder_case(case)
    whole, parts = (made.make(num_pages=6, page_tokens=16) for _ in range(2))
    expected = whole.forward(part_of_prompt(0, 53))
    cuts = [0, 7, 8, 32, 53]
    for start, end in itertools.pairwise(cuts):
        np.testing.assert_array_equal(
            parts.forward(part_of_prompt(start, end)), expected[start:end]
        )


@pytest.mark.parametrize(
    "options",
    [
        {"weight_dtype": "bfloat16", "kv_dtype": "bfloat16", "rounds_activations": True},
        {"weight_dtype": "int8"},
        {"isa": "portable"},
    ],
)
@pytest.mark.parametrize("case", GEMMAS)
def test_rounded_gemmas_are_near_exact_ones(case: str, options: dict[str, Any]) -> None:
    """Of later tokens, some round their way to other experts."""
    made = decoder_case(case)
    logits = made.make(num_pages=6, page_tokens=16, **options).forward(part_of_prompt(0, 53))
    differences = np.linalg.norm(logits - made.logits, axis=1) / np.linalg.norm(made.logits, axis=1)
    assert np.quantile(differences, 0.1) < (1e-5 if "isa" in options else 0.1)


@pytest.mark.parametrize("case", [case for case in GEMMAS if " " in case])
def test_gemmas_of_two_workers_agree_with_transformers(case: str) -> None:
    """test_family_table.py has the others."""
    made = decoder_case(case)
    team = Team(made.ours.spec, made.ours.weights, 2, num_pages=6, page_tokens=16)
    try:
        logits = team.forward(part_of_prompt(0, len(PROMPTS[2])))
    finally:
        team.close()
    np.testing.assert_allclose(logits, made.logits, atol=1e-4, rtol=0)


def test_layers_that_read_others_keys_have_no_pages() -> None:
    spec = lower_config(CONFIGS["gemma4_text"])
    assert [layer.keys_of for layer in spec.layers] == [None, None, 0, 1]
    numbers = 2 * 2 * 16 + 2 * 2 * 32  # keys and values of two heads in either layer
    assert page_bytes(spec, 16, KVDtype.FLOAT32) == 4 * 16 * numbers


def test_stored_keys_that_no_layer_computes_are_left_out(tmp_path: Path) -> None:
    """Published files have them in all layers."""
    model = tiny_gemma("gemma4_text")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    name = "model.layers.3.self_attn."
    unread = {f"{name}k_proj.weight": torch.ones(64, 64), f"{name}k_norm.weight": torch.ones(32)}
    save_file(load_file(path) | unread, path)
    assert not any(".3.k" in weight for weight in open_model(tmp_path).weights)


def test_text_of_gemma_4_with_towers_is_served(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("gemma4", text_config=CONFIGS["gemma4_text"])
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.save_pretrained(tmp_path)
    stored = load_file(path := tmp_path / "model.safetensors")
    save_file(stored | {"model.embed_vision.embedding_projection.weight": torch.ones(2, 2)}, path)
    assert answers_of(tmp_path) == endless_answers(model, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("case", GEMMAS)
def test_gguf_files_of_gemmas_generate_the_same(case: str, tmp_path: Path) -> None:
    built_in = {"altup_correct_scale": True} if "of three" in case else {}
    model = tiny_gemma(case, **built_in)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    assert answers_of(path) == endless_answers(model, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("gemma4_text", {"use_bidirectional_attention": "all"}),
        ("gemma4_text", {"num_kv_shared_layers": 3}),
        ("gemma4_text", {"num_kv_shared_layers": 4}),
        ("gemma3n_text", {"altup_active_idx": 1}),
        ("gemma3n_text", {"hidden_size_per_layer_input": 0}),
        ("gemma3n_text", {"activation_sparsity_pattern": [1.5] * 4}),
        ("gemma3n_text", {"layer_types": [SLIDING] * 3 + ["linear_attention"]}),
    ],
)
def test_wrong_gemmas_are_refused(family: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="|".join(wrong)):
        lower_config(CONFIGS[family] | wrong)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hidden_size_per_layer_input": 24}, "24 numbers per layer, not a multiple of 16"),
        ({"altup_num_inputs": 9}, "9 residuals; there can be 2 to 8"),
    ],
)
def test_core_refuses_gemmas_that_it_cannot_run(fields: dict[str, Any], why: str) -> None:
    spec = lower_config(CONFIGS["gemma3n_text"] | fields)
    with pytest.raises(UnsupportedSpec, match=why):
        CpuExecutor(spec, {}, num_pages=1)


def test_published_config_of_gemma_4_is_read() -> None:
    """The fields of a text_config as published, without heads of each layer."""
    config = CONFIGS["gemma4_text"] | {
        "per_layer_config": None,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "layer_types": [SLIDING, FULL] * 2,
    }
    spec = lower_config(config)
    assert [spec.kv_heads_of(layer) for layer in spec.layers] == [(2, 16), (1, 512)] * 2
    assert [layer.has_values for layer in spec.layers] == [True, False] * 2
    assert len(spec.ropes[0].inv_freq) == 256 and not any(spec.ropes[0].inv_freq[64:])
