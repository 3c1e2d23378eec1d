"""What the converter of llama.cpp writes of mixtures of experts, beside a dense model's."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
NAMES = {  # the first that occurs in a name is replaced; the others follow
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.": "mlp.",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.": "mlp.shared_expert.",
    "mlp.shared_mlp.": "mlp.shared_expert.",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "granitemoeshared": "granitemoe",
    "gpt_oss": "gpt-oss",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
}
BUILT_IN: dict[str, dict[str, Any]] = {  # in llama.cpp, so that files do not say it
    "qwen2_moe": {"norm_topk_prob": False},
    "gpt_oss": {"swiglu_limit": 7.0},
    "llama4_text": {
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
}
POST_NORMS = {"gpt-oss", "glm4moe"}  # the MLP's norm is called after attention
KEYS = {  # in the order of which a family's own one wins
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_token": "expert_used_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_topk": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "routed_scaling_factor": "expert_weights_scale",
}


def metadata(config: Any, architecture: str) -> Iterator[tuple[str, Any]]:
    """Return the keys of experts."""
    for name, key in KEYS.items():
        if (value := getattr(config, name, None)) is not None:
            yield key, value
    if architecture in ("glm4moe", "dots1"):
        yield "expert_weights_norm", config.norm_topk_prob
        yield "expert_gating_func", 2
    if architecture == "hunyuan-moe":
        for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
            yield key, config.intermediate_size
        yield "expert_shared_count", 1
    if architecture == "minimax-m2":
        yield "expert_gating_func", 2
    if architecture in ("gpt-oss", "llama4", "minimax-m2"):
        yield "expert_feed_forward_length", config.intermediate_size
    if architecture == "llama4":
        yield "feed_forward_length", config.intermediate_size_mlp
        yield "interleave_moe_layer_step", config.interleave_moe_layer_step
    if architecture == "ernie4_5-moe":
        length = config.intermediate_size // config.num_key_value_heads  # of no meaning
        yield "expert_shared_feed_forward_length", length


def tensors(name: str, numbers: Floats, architecture: str) -> Iterator[tuple[str, Floats]]:
    """Return what a tensor of transformers is in the file: gate and up are tensors of their own."""
    module, _, part = name.partition(".experts.")
    layer = module.rpartition(".")[0]
    bias = ".bias" if part.endswith("_bias") else ".weight"
    if part and architecture == "llama4":
        numbers = numbers.transpose(0, 2, 1)
    if part and architecture == "gpt-oss":
        numbers = numbers if bias == ".bias" else numbers.transpose(0, 2, 1)
    if part.startswith("gate_up_proj") and architecture == "gpt-oss":
        yield f"{layer}.ffn_gate_exps{bias}", np.ascontiguousarray(numbers[:, 0::2])
        yield f"{layer}.ffn_up_exps{bias}", np.ascontiguousarray(numbers[:, 1::2])
    elif part.startswith("gate_up_proj"):
        gate, up = np.split(numbers, 2, axis=1)
        yield f"{layer}.ffn_gate_exps.weight", gate
        yield f"{layer}.ffn_up_exps.weight", up
    elif part.startswith("down_proj"):
        yield f"{layer}.ffn_down_exps{bias}", np.ascontiguousarray(numbers)
    elif name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(numbers, 2)
        yield name.replace("shared_mlp.input_linear", "ffn_gate_shexp"), gate
        yield name.replace("shared_mlp.input_linear", "ffn_up_shexp"), up
    else:
        for theirs, ggufs in NAMES.items():
            name = name.replace(theirs, ggufs)
        yield name, numbers[:, 0] if name.endswith("conv.conv.weight") else numbers  # LFM2


def fused(stored: Mapping[str, Floats]) -> dict[str, Floats]:
    """Join the rows of gate and up of each expert."""
    joined = {}
    for name, numbers in stored.items():
        if "ffn_gate_exps" in name:
            pair = (numbers, stored[name.replace("ffn_gate_exps", "ffn_up_exps")])
            joined[name.replace("ffn_gate_exps", "ffn_gate_up_exps")] = np.concatenate(pair, axis=1)
        elif "ffn_up_exps" not in name:
            joined[name] = numbers
    return joined
