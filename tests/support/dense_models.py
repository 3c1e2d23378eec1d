"""Tiny random dense decoders of transformers."""

from typing import Any

from random_models import random_model

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

DENSE: dict[str, dict[str, Any]] = {
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
    "apertus": {"head_dim": 24},
    "apertus with biases": {"attention_bias": True, "rope_parameters": LLAMA3},
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


CONSTANT = ("bias", "sinks", "alpha_p", "alpha_n")


def tiny_dense(case: str, **differences: Any) -> Any:
    """Make the random model of a case."""
    return random_model(case, TINY | DENSE[case] | differences, CONSTANT)
