"""Tiny random hybrids of transformers."""

from typing import Any

import mixture_models
from random_models import random_model

TINY = mixture_models.TINY | {
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
EXPERTS = {
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
DELTA_NETS = {
    "layer_types": None,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "head_dim": 32,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 3, 3],
    "mrope_interleaved": True,
}
SHARED_EXPERT = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
}
GRANITE = MAMBA | {
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
NEMOTRON = {
    "layer_types": None,
    "num_hidden_layers": None,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 1e-30,  # transformers bounds the steps of prompts, and no others
    "time_step_floor": 0.5,
}
KIMI = {
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_head_dim": 20,
    "linear_num_heads": 3,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_expert_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "model_max_length": 512,
}
FALCON = MAMBA | {"layer_types": None, "mamba_d_ssm": 128, "mamba_norm_before_gate": False}
JAMBA = {
    "layer_types": None,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 5,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2 with biases and an adjusted size": {
        "conv_bias": True,
        "conv_L_cache": 4,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "lfm2_moe": EXPERTS | {"routed_scaling_factor": 1.7},
    "lfm2_moe without a bias of experts": EXPERTS
    | {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
    "qwen3_next": DELTA_NETS | SHARED_EXPERT,
    "qwen3_next with dense layers and biases": DELTA_NETS
    | SHARED_EXPERT
    | {
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "mlp_only_layers": [1],
        "attention_bias": True,
        "linear_conv_kernel_dim": 2,
        "linear_num_value_heads": 2,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.5,
    },
    "qwen3_5_text": DELTA_NETS | {"rope_parameters": MROPE},
    "qwen3_5_moe_text": DELTA_NETS | SHARED_EXPERT | {"linear_num_value_heads": 2},
    "bamba": MAMBA | {"layer_types": None, "attn_layer_indices": [2]},
    "bamba with biases and groups": MAMBA
    | {
        "layer_types": None,
        "attn_layer_indices": [0, 3],
        "mamba_n_groups": 2,
        "mamba_proj_bias": True,
        "mamba_d_conv": 3,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 2},
    "granitemoehybrid without experts": GRANITE
    | {"num_local_experts": 0, "mamba_n_groups": 4, "position_embedding_type": "rope"},
    "granitemoehybrid of attention only": GRANITE
    | {"num_local_experts": 0, "layer_types": ["attention"] * 4},
    "nemotron_h": NEMOTRON | {"hybrid_override_pattern": "M-M*-M"},
    "nemotron_h with experts and biases": NEMOTRON
    | {
        "hybrid_override_pattern": "*EM-E",
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 1.7,
        "n_group": 4,
        "topk_group": 2,
        "use_bias": True,
        "mlp_bias": True,
    },
    "jamba": JAMBA,
    "jamba without experts, with biases": JAMBA
    | {
        "num_experts": 1,
        "num_experts_per_tok": None,
        "attn_layer_offset": 0,
        "mamba_d_conv": 3,
        "mamba_expand": 1,
        "mamba_dt_rank": "auto",
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "tie_word_embeddings": True,
    },
    "falcon_h1": FALCON | {"mamba_rms_norm": True, "mamba_n_groups": 2},
    "falcon_h1 without norms, with multipliers": FALCON
    | {
        "mamba_d_ssm": 96,
        "mamba_d_head": 12,
        "mlp_bias": True,
        "projectors_bias": True,
        "embedding_multiplier": 1.7,
        "lm_head_multiplier": 0.6,
        "mlp_multipliers": [0.8, 1.2],
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [0.7, 1.3, 0.8, 1.1, 0.9],
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.7,
    },
    "falcon_h1 with norms before gates": FALCON
    | {
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "mamba_proj_bias": True,
        "attention_bias": True,
    },
}
HYBRIDS |= {
    "kimi_linear": KIMI,
    "kimi_linear with compressed queries": KIMI | {"q_lora_rank": 48, "mlp_layer_types": None},
}


def tiny_hybrid(case: str, **differences: Any) -> Any:
    """Make the random model of a case. None for a field of `TINY` leaves it to the family.

    Its states last, and its skips differ.
    """
    fields = TINY | HYBRIDS[case] | differences
    given = {name: value for name, value in fields.items() if value is not None}
    model = random_model(case, given, ("bias", "A_log", ".D"))
    for name, numbers in model.named_parameters():
        if name.endswith(("A_log", ".D")):
            numbers.data -= 3 if "A_log" in name else 0
    return model
