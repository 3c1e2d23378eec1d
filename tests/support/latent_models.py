"""Tiny random models of transformers with multi-head latent attention."""

from typing import Any

import mixture_models
from random_models import random_model

TINY = mixture_models.TINY | {
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
INDEXER = {  # of enough tokens for all texts here
    "index_topk": 128,
    "index_head_dim": 24,
    "index_n_heads": 2,
}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v3": EXPERTS | {"routed_scaling_factor": 2.5},
    "deepseek_v3 with YaRN, plain queries and biases": EXPERTS
    | {
        "rope_parameters": YARN,
        "q_lora_rank": None,
        "attention_bias": True,
        "norm_topk_prob": False,
        "first_k_dense_replace": 2,
    },
    "deepseek_v3 with halves and many heads": EXPERTS
    | {
        "rope_interleave": False,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "v_head_dim": 16,
    },
    "deepseek_v2": EXPERTS
    | {
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "n_group": None,
        "topk_group": None,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v32": EXPERTS | INDEXER | {"first_k_dense_replace": 2},
    "glm_moe_dsa": EXPERTS | INDEXER | {"rope_parameters": YARN},
    "mistral4": EXPERTS
    | {
        "first_k_dense_replace": 1,
        "rope_parameters": YARN
        | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5},
    },
    "glm4_moe_lite": EXPERTS | {"mlp_layer_types": ["dense", "sparse", "dense"]},
    "youtu": {},
    "youtu without tied embeddings": {"tie_word_embeddings": False, "attention_bias": True},
    "minicpm3": {"v_head_dim": 16, "dim_model_base": 32},
    "deepseek_v2 with groups": EXPERTS
    | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7, "mlp_bias": True},
}


def tiny_latent(case: str, **differences: Any) -> Any:
    """Make the random model of a case."""
    return random_model(case, TINY | LATENT[case] | differences)
