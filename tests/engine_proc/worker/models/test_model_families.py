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

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {  # PROMPT is within the trained length
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [4.0] * 8,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
SLIDING_FIRST = ["sliding_attention", "full_attention"]
GEMMA = {
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "sliding_window": 5,
    "rms_norm_eps": 1e-3,  # the usual 1e-6 would not show beside embeddings scaled up
}

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "llama with llama3 rope": {"rope_parameters": LLAMA3},
    "llama with yarn rope": {"rope_parameters": YARN},
    "llama with linear rope": {"rope_parameters": LINEAR},
    "mistral": {"sliding_window": None, "head_dim": 24},
    "mistral with a window": {"sliding_window": 5},
    "qwen2": {},
    "qwen2 with a window": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"head_dim": 24},
    "gemma": {"head_dim": 24, "rms_norm_eps": 1e-3},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"layer_types": SLIDING_FIRST},
    "phi3": {"head_dim": 24},
    "phi3 with a window and part rotated": {
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "phi3 with LongRoPE": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "glm4": {"attention_bias": True, "head_dim": 24},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "granite_swa": {
        "attention_multiplier": 0.3,
        "sliding_window": 5,
        "layer_types": SLIDING_FIRST,
        "layer_rope_theta": [5000.0, 0],
    },
    "granite_swa with one RoPE": {"layer_types": SLIDING_FIRST, "sliding_window": 5},
    "cohere": {"logit_scale": 1.5},
    "cohere with wide heads": {"head_dim": 24, "logit_scale": 1.5},
    "cohere2": {"logit_scale": 1.5, "sliding_window": 5, "layer_types": SLIDING_FIRST},
    "ernie4_5": {"head_dim": 24, "use_bias": True},
    "exaone4": {"sliding_window": 5, "layer_types": SLIDING_FIRST},
    "exaone4 without windows": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "helium": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "ministral": {"sliding_window": 5, "layer_types": SLIDING_FIRST, "head_dim": 24},
    "ministral3": {
        "head_dim": 24,
        "rope_parameters": YARN
        | {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5},
    },
    "olmo3": {
        "sliding_window": 5,
        "layer_types": SLIDING_FIRST,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    },
    "seed_oss": {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True},
    "hunyuan_v1_dense": {"head_dim": 24, "attention_bias": True},
    "starcoder2": {},
    "starcoder2 with a window, without biases": {
        "use_bias": False,
        "sliding_window": 5,
        "hidden_act": "gelu",
    },
    "nemotron": {"head_dim": 24, "initializer_range": 0.1},
    "nemotron with biases": {
        "attention_bias": True,
        "mlp_bias": True,
        "initializer_range": 0.1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e3,
            "partial_rotary_factor": 0.75,
        },
    },
    "arcee": {"rope_parameters": YARN},
    "arcee with biases": {"attention_bias": True, "mlp_bias": True},
    "gpt_neox": {},
    "gpt_neox one after the other": {
        "use_parallel_residual": False,
        "attention_bias": False,
        "hidden_act": "gelu_fast",
    },
    "phi": {},
    "phi with as many keys as queries": {"num_key_value_heads": 4, "hidden_act": "gelu"},
    "stablelm": {"use_qkv_bias": True},
    "stablelm with one norm": {"use_parallel_residual": True, "partial_rotary_factor": 0.5},
}


def save_tiny(folder: Path, model_type: str, **differences: Any) -> Any:
    """Save a random model of a family, and return it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **TINY | differences)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("bias", "sinks")):  # they start as ones and zeros
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.eval().save_pretrained(folder)
    return model


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


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, case.split()[0], **CASES[case])
    expected = reference(model)
    assert np.abs(expected).max() > 1  # a model that says nothing agrees with anything
    for by in EXECUTORS:
        np.testing.assert_allclose(run(tmp_path, by), expected, atol=2e-5, rtol=0, err_msg=by)


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
