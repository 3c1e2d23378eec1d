"""Tiny random models of Gemma 3n and Gemma 4."""

from typing import Any

import mixture_models
from random_models import random_model

SLIDING, FULL = "sliding_attention", "full_attention"
TINY = mixture_models.TINY | {
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "head_dim": 16,
    "sliding_window": 5,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "tie_word_embeddings": False,  # large embeddings with a tied head repeat a token
    "rms_norm_eps": 1e-3,  # the usual 1e-6 would not show
}
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 2e4},
}
GEMMAS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_text with wide MLPs": {
        "global_head_dim": 24,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 20.0,
        "rope_parameters": ROPES,
    },
    "gemma4_text with experts": {
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
    },
    "gemma3n_text": {
        "laurel_rank": 8,
        "intermediate_size": [80, 96, 64, 96],
        "activation_sparsity_pattern": [0.5, 0.0, 0.9, 0.0],
        "num_kv_shared_layers": 2,
    },
    "gemma3n_text of three residuals": {
        "laurel_rank": 24,
        "altup_num_inputs": 3,
        "altup_correct_scale": False,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 90,
    },
}
CONSTANT = ("layer_scalar", "router.scale", "per_expert_scale", "correct_output_scale")


def tiny_gemma(case: str, **differences: Any) -> Any:
    """Make the random model of a case."""
    return random_model(case, TINY | GEMMAS[case] | differences, CONSTANT)
