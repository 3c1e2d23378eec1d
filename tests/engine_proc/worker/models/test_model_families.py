"""Lower, then check: every family's spec, executed by torch and by the core, gives the logits of
transformers.

The models are random and tiny, but odd. They have fewer KV heads than heads, wide heads, windows
shorter than the prompt, and multipliers away from 1.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from dense_models import DENSE, LLAMA3, LONGROPE, SLIDING_FIRST, TINY, YARN, tiny_dense
from safetensors.torch import load_file, save_file

from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.lowering import lower_config
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor
from headrace.errors import ModelError

PAGES = [5, 2, 7, 0, 3, 6]  # of the one sequence: neither first, nor in order
EXECUTORS = {
    "torch": partial(TorchExecutor, page_tokens=4),
    "core": partial(CpuExecutor, page_tokens=16),
}
PROMPT = [17, 3, 94, 55, 8, 61, 42, 7, 23, 88, 31, 12, 70, 5, 64, 29]


def batch(tokens: Sequence[int], start: int) -> Batch:
    """One sequence's tokens from position `start` on, with logits for all of them."""
    rows = np.arange(len(tokens), dtype=np.int32)
    return Batch(
        token_ids=np.array(tokens, np.int32),
        positions=rows + start,
        sequences=np.zeros_like(rows),
        page_table=np.array([PAGES], np.int32),
        logit_rows=rows,
    )


def run(folder: Path, by: str) -> Floats:
    """Execute the prompt in two chunks and a decode step; return all logits."""
    model = open_model(folder)
    executor = EXECUTORS[by](model.spec, model.weights, num_pages=8)
    cuts = [0, 9, len(PROMPT) - 1, len(PROMPT)]
    steps = [batch(PROMPT[a:b], a) for a, b in itertools.pairwise(cuts)]
    return np.concatenate([executor.forward(step) for step in steps])


def reference(model: Any) -> npt.NDArray[np.float32]:
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model(torch.tensor([PROMPT])).logits[0].numpy()
    return logits


@pytest.mark.parametrize("case", DENSE)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_dense(case)
    model.save_pretrained(tmp_path)
    expected = reference(model)
    assert np.abs(expected).max() > 1  # a model that says nothing agrees with anything
    for by in EXECUTORS:
        np.testing.assert_allclose(run(tmp_path, by), expected, atol=2e-5, rtol=0, err_msg=by)


def test_masks_in_old_files_of_gpt_neox_are_passed_over(tmp_path: Path) -> None:
    model = tiny_dense("gpt_neox")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["gpt_neox.layers.1.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    tensors["gpt_neox.layers.1.attention.masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, tmp_path / "model.safetensors")
    np.testing.assert_allclose(run(tmp_path, "core"), reference(model), atol=2e-5, rtol=0)


def test_queries_keys_and_values_are_picked_by_head(tmp_path: Path) -> None:
    tiny_dense("gpt_neox").save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")[
        "gpt_neox.layers.1.attention.query_key_value.weight"
    ].numpy()
    keys = open_model(tmp_path).weights["layers.1.k"]
    expected = whole.reshape(4, 3, 16, 64)[:, 1].reshape(64, 64)
    np.testing.assert_array_equal(keys.to_float32(), expected)
    part = keys.rows(10, 40).columns(16, 48)
    np.testing.assert_array_equal(part.to_float32(), expected[10:40, 16:48])


def config_of(model_type: str, **differences: Any) -> dict[str, Any]:
    config = transformers.AutoConfig.for_model(model_type, **TINY).to_dict()
    return {**config, **differences}


def test_older_rope_fields_mean_the_same() -> None:
    new = config_of("llama", rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    old = config_of("llama", rope_parameters=None, rope_scaling=LLAMA3, rope_theta=5e5)
    old["rope_scaling"] = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    assert lower_config(old) == lower_config(new)


def test_older_gemma3_fields_mean_the_same() -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    new = config_of("gemma3_text", layer_types=SLIDING_FIRST, rope_parameters=ropes)
    old = config_of(
        "gemma3_text",
        layer_types=None,
        sliding_window_pattern=2,
        rope_parameters=None,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_theta=1e6,
        rope_local_base_freq=2e4,
    )
    assert lower_config(old) == lower_config(new)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "smollm3"])
def test_a_window_that_is_not_used_changes_nothing(model_type: str) -> None:
    published = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 1}
    assert lower_config(config_of(model_type, **published)) == lower_config(config_of(model_type))


@pytest.mark.parametrize(
    ("model_type", "published"),
    [
        ("starcoder2", {"norm_type": "layer_norm", "mlp_type": "default", "embedding_dropout": 1}),
        ("nemotron", {"rope_percent": 0.5, "partial_rotary_factor": 0.5}),
        (
            "gpt_neox",
            {"rotary_pct": 0.25, "rotary_emb_base": 10000, "rope_parameters": None},
        ),
        ("apertus", {"qk_norm": True, "post_norm": False, "mlp_bias": False}),
    ],
)
def test_published_fields_without_gates_change_nothing(
    model_type: str, published: dict[str, Any]
) -> None:
    assert lower_config(config_of(model_type, **published)) == lower_config(config_of(model_type))


def test_what_cohere2_says_of_itself_changes_nothing() -> None:
    said = {
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    }
    assert lower_config(config_of("cohere2", **said)) == lower_config(config_of("cohere2"))


@pytest.mark.parametrize(
    ("model_type", "differences", "named"),
    [
        ("mamba", {}, "model_type 'mamba'"),
        ("llama", {"head_dim": 1 << 40}, "heads of 1099511627776 numbers"),
        ("llama", {"rms_norm_eps": float("nan")}, "'rms_norm_eps': nan, not a number that fp32"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e300}},
            "'rope_theta': 1e+300, not a number",
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "'short_factor'"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'"),
        (
            "phi3",
            {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 1}},
            "'original_max_position_embeddings': 1, not 2 or more",
        ),
        ("hunyuan_v1_dense", {"rope_scaling": {"rope_theta": "x"}}, "'rope_theta': 'x', not a"),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": 2.0}, "head_dim": 2},
            "'head_dim': 2, not 4 or more",
        ),
        ("stablelm", {"qk_layernorm": True}, "'qk_layernorm'"),
        ("phi", {"qk_layernorm": True}, "'qk_layernorm'"),
        ("starcoder2", {"mlp_type": "gated"}, "'mlp_type': 'gated', not 'default'"),
        ("apertus", {"qk_norm": False}, "'qk_norm': False, not true"),
        ("llama", {"hidden_act": "xielu"}, "'hidden_act': 'xielu'"),
        (
            "ministral3",
            {"rope_parameters": YARN},
            "lacks 'llama_4_scaling_beta'",
        ),
        ("llama", {"rope_parameters": YARN | {"mystery": 1.0}}, "'mystery'"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "'quantization_config'"),
        ("gemma", {"use_bidirectional_attention": True}, "'use_bidirectional_attention'"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping'"),
        ("cohere", {"use_qk_norm": True}, "'use_qk_norm'"),
        ("cohere2", {"rotary_pct": 0.5}, "'rotary_pct'"),
        ("cohere2", {"use_parallel_block": False}, "'use_parallel_block'"),
        ("exaone4", {"sliding_window": None, "layer_types": SLIDING_FIRST}, "'sliding_window'"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "'layer_types'"),
        ("llama", {"hidden_act": "relu"}, "'hidden_act'"),
        ("llama", {"hidden_size": "64"}, "'hidden_size'"),
        ("llama", {"vocab_size": None}, "'vocab_size'"),
        ("llama", {"num_key_value_heads": 3}, "'num_key_value_heads'"),
        ("llama", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
    ],
)
def test_what_cannot_be_executed_exactly_is_refused_by_name(
    model_type: str, differences: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError) as refused:
        lower_config(config_of(model_type, **differences))
    assert named in str(refused.value)
    assert model_type in str(refused.value)
