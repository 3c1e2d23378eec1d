"""The architectures of GGUF files: the family that executes each, and what is its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

SILU = {"hidden_act": "silu"}
GELU_ACT = {"hidden_act": "gelu_pytorch_tanh"}
GELU = GELU_ACT | {"hidden_activation": "gelu_pytorch_tanh"}
RELU2 = {"hidden_act": "relu2"}
MLP_RELU2 = {"mlp_hidden_act": "relu2"}
WINDOW = {"sliding_window": 4096}  # of files that have none, though their family has
SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
NEWER_GEMMA = {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
}
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # of `expert_gating_func`; 0 is the default
COUNTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
EXPERTS = {
    **COUNTS,
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}
GROUPED = {
    **EXPERTS,
    "expert_count": "n_routed_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
ERNIE = {
    "expert_count": "moe_num_experts",
    "expert_used_count": "moe_k",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "moe_num_shared_experts",
    "interleave_moe_layer_step": "moe_layer_interval",
    "leading_dense_block_count": "moe_layer_start_index",
}
HUNYUAN = {  # sizes that the tensors repeat
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "num_shared_expert",
}
LATENTS = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}
NO_DENSE = {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 0}
LFM2 = {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}
DELTA_NETS = {
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
NEMOTRON_H = {
    **GROUPED,
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
}
GRANITE_HYBRID = {**SCALES, "expert_shared_feed_forward_length": "shared_intermediate_size"}
MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_dt_rank",
}
NO_MSCALE = {"attention_factor": 1.0}  # DeepSeek's two factors of cos and sin cancel out
TEMPERATURE = "attention.temperature_scale"  # of Ministral 3, not of Mistral Small
LAYER_NORM = "attention.layer_norm_epsilon"
COHERE = {LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The family that executes an architecture, and what its files have beside KEYS.

    Converters permute the rows of Llama's queries and keys so that rotated pairs are adjacent.
    They stay so, and are rotated accordingly.
    """

    family: str  # a key of `FAMILIES`
    permuted: bool = False
    slides: bool = False  # the family reads `layer_types`
    has_convs: bool = False  # layers without KV heads are short convolutions
    is_tiled: bool = False  # the value heads of its delta nets are in llama.cpp's order
    has_mamba2: bool = False  # so are they Mamba-2, or beside it
    has_mamba: bool = False  # or Mamba
    has_latents: bool = False  # keys and values are products of one latent
    is_partial: bool = False  # the family reads `partial_rotary_factor`
    constants: Mapping[str, Any] = field(default_factory=lambda: SILU)
    keys: Mapping[str, str] = field(default_factory=dict)
    gating: int = SOFTMAX  # the only `expert_gating_func`
    yarn: Mapping[str, Any] = field(default_factory=dict)  # what files leave out


ARCHITECTURES = {
    "llama": Architecture(family="llama", permuted=True),
    "mistral3": Architecture(family="llama", permuted=True),
    "qwen2": Architecture(family="qwen2"),
    "qwen2vl": Architecture(family="qwen2_5_vl_text"),
    "qwen3": Architecture(family="qwen3"),
    "gemma": Architecture(family="gemma", constants=GELU),
    "gemma2": Architecture(family="gemma2", slides=True, constants=GELU | WINDOW, keys=SOFTCAPS),
    "gemma3": Architecture(family="gemma3_text", slides=True, constants=GELU, keys=SOFTCAPS),
    "gemma3n": Architecture(
        family="gemma3n_text",
        slides=True,
        constants=GELU,
        keys=NEWER_GEMMA
        | {"altup.active_idx": "altup_active_idx", "altup.num_inputs": "altup_num_inputs"},
    ),
    "gemma4": Architecture(family="gemma4_text", slides=True, constants=GELU, keys=NEWER_GEMMA),
    "phi3": Architecture(family="phi3", is_partial=True),
    "granite": Architecture(family="granite", permuted=True, keys=SCALES),
    "granite_swa": Architecture(family="granite_swa", permuted=True, slides=True, keys=SCALES),
    "olmo2": Architecture(family="olmo3", slides=True),  # OLMo 2 is OLMo 3 without windows
    "granitehybrid": Architecture(
        family="granitemoehybrid",
        permuted=True,
        has_mamba2=True,
        constants=SILU | {"num_local_experts": 0},
        keys=GRANITE_HYBRID,
    ),
    "falcon-h1": Architecture(
        family="falcon_h1",
        has_mamba2=True,
        constants=SILU | {"mamba_norm_before_gate": False},
    ),
    "nemotron_h": Architecture(
        family="nemotron_h", has_mamba2=True, constants=MLP_RELU2, keys=NEMOTRON_H
    ),
    "smollm3": Architecture(family="smollm3", permuted=True),
    "glm4": Architecture(family="glm4", is_partial=True),
    "ernie4_5": Architecture(family="ernie4_5"),
    "exaone4": Architecture(family="exaone4", slides=True),
    "command-r": Architecture(family="cohere", keys=COHERE),
    "cohere2": Architecture(family="cohere2", slides=True, constants=SILU | WINDOW, keys=COHERE),
    "deepseek2": Architecture(  # without experts
        family="youtu", has_latents=True, keys=LATENTS, yarn=NO_MSCALE
    ),
    "lfm2": Architecture(
        family="lfm2", has_convs=True, constants={"block_auto_adjust_ff_dim": False}, keys=LFM2
    ),
    "qwen35": Architecture(family="qwen3_5_text", is_partial=True, is_tiled=True, keys=DELTA_NETS),
    "starcoder2": Architecture(
        family="starcoder2", constants=GELU_ACT | WINDOW, keys={LAYER_NORM: "norm_epsilon"}
    ),
    "nemotron": Architecture(
        family="nemotron", is_partial=True, constants=RELU2, keys={LAYER_NORM: "norm_eps"}
    ),
    "arcee": Architecture(family="arcee", permuted=True, constants=RELU2),
    "apertus": Architecture(family="apertus", constants={"hidden_act": "xielu"}),
    "gptneox": Architecture(
        family="gpt_neox",
        is_partial=True,
        constants={"hidden_act": "gelu"},
        keys={LAYER_NORM: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
    ),
    "phi2": Architecture(
        family="phi", is_partial=True, constants=GELU_ACT, keys={LAYER_NORM: "layer_norm_eps"}
    ),
    "seed_oss": Architecture(family="seed_oss"),
    "hunyuan-dense": Architecture(family="hunyuan_v1_dense"),
    "stablelm": Architecture(
        family="stablelm",
        is_partial=True,
        keys={
            LAYER_NORM: "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
    ),
}
# Of files whose `expert_count` is not 0.
MIXTURES = {
    "llama": Architecture(family="mixtral", permuted=True, keys=COUNTS),
    "gemma4": Architecture(
        family="gemma4_text",
        slides=True,
        constants=GELU | {"enable_moe_block": True},
        keys=NEWER_GEMMA
        | {
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_used_count": "top_k_experts",
        },
    ),
    "qwen2moe": Architecture(
        family="qwen2_moe",
        keys=EXPERTS | SHARED_EXPERT,
    ),
    "qwen3moe": Architecture(
        family="qwen3_moe", constants=SILU | {"norm_topk_prob": True}, keys=EXPERTS
    ),
    "olmoe": Architecture(family="olmoe", keys=COUNTS | {"expert_weights_norm": "norm_topk_prob"}),
    "granitemoe": Architecture(
        family="granitemoeshared",
        permuted=True,
        keys=SCALES | COUNTS | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
    ),
    "granitehybrid": Architecture(
        family="granitemoehybrid",
        permuted=True,
        has_mamba2=True,
        keys=GRANITE_HYBRID | COUNTS,
    ),
    "nemotron_h_moe": Architecture(
        family="nemotron_h",
        has_mamba2=True,
        constants=MLP_RELU2,
        keys=NEMOTRON_H,
        gating=SIGMOID,
    ),
    "gpt-oss": Architecture(
        family="gpt_oss",
        slides=True,
        keys=COUNTS | {"expert_feed_forward_length": "intermediate_size"},
        gating=SOFTMAX_OF_CHOSEN,
        yarn={"truncate": False},
    ),
    "ernie4_5-moe": Architecture(
        family="ernie4_5_moe",
        constants=SILU | {"moe_layer_start_index": 0, "moe_num_shared_experts": 0},
        keys=ERNIE,
    ),
    "glm4moe": Architecture(
        family="glm4_moe",
        is_partial=True,
        constants=SILU | NO_DENSE,
        keys=GROUPED,
        gating=SIGMOID,
    ),
    "hunyuan-moe": Architecture(
        family="hunyuan_v1_moe",
        keys={"expert_count": "num_experts", "expert_used_count": "moe_topk", **HUNYUAN},
    ),
    "llama4": Architecture(
        family="llama4_text",
        keys=COUNTS
        | {
            "expert_feed_forward_length": "intermediate_size",
            "feed_forward_length": "intermediate_size_mlp",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        gating=SIGMOID,
    ),
    "lfm2moe": Architecture(
        family="lfm2_moe",
        has_convs=True,
        constants={"num_dense_layers": 0},
        keys=EXPERTS
        | LFM2
        | {
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "num_dense_layers",
        },
        gating=SIGMOID,
    ),
    "jamba": Architecture(  # with one expert, where it has none
        family="jamba",
        has_mamba=True,
        keys=MAMBA | {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    ),
    "minimax-m2": Architecture(
        family="minimax_m2",
        is_partial=True,
        keys=COUNTS | {"expert_feed_forward_length": "intermediate_size"},
        gating=SIGMOID,
    ),
    "phimoe": Architecture(family="phimoe", keys=COUNTS),
    "qwen3next": Architecture(
        family="qwen3_next", is_partial=True, keys=EXPERTS | SHARED_EXPERT | DELTA_NETS
    ),
    "qwen35moe": Architecture(
        family="qwen3_5_moe_text",
        is_partial=True,
        is_tiled=True,
        keys=EXPERTS | SHARED_EXPERT | DELTA_NETS,
    ),
    "kimi-linear": Architecture(
        family="kimi_linear",
        has_latents=True,
        constants=SILU | NO_DENSE | {"norm_topk_prob": True},
        keys=GROUPED
        | LATENTS
        | {"kda.head_dim": "linear_head_dim", "ssm.conv_kernel": "linear_conv_kernel_dim"},
        gating=SIGMOID,
    ),
    "dots1": Architecture(family="dots1", constants=SILU | NO_DENSE, keys=GROUPED, gating=SIGMOID),
    "deepseek2": Architecture(
        family="deepseek_v2",
        has_latents=True,
        constants=SILU | NO_DENSE,
        keys=GROUPED | LATENTS,
        yarn=NO_MSCALE,
    ),
}
MAMBA2 = {  # what families call these
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "conv_bias": "mamba_conv_bias",
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": "mamba_n_groups",
    "ssm.state_size": "mamba_d_state",
}
NEMOTRON_MAMBA2 = {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "conv_bias": "use_conv_bias",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.group_count": "n_groups",
    "ssm.state_size": "ssm_state_size",
}
DEEPSEEK_V3 = replace(MIXTURES["deepseek2"], family="deepseek_v3", gating=SIGMOID)
