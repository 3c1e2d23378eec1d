"""What the converter of llama.cpp writes of latent attention, beside what other models have."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
ARCHITECTURES = dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2")
ARCHITECTURES["kimi_linear"] = "kimi-linear"
SIGMOID = ("deepseek_v3", "glm4_moe_lite", "kimi_linear")
NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    **{f"self_attn.{name}_conv1d": f"ssm_conv1d_{name}" for name in "qkv"},
    "self_attn.forget_gate.f_a_proj": "ssm_f_a",
    "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    "self_attn.forget_gate.A_log": "ssm_a",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.o_norm": "ssm_norm",
}


def metadata(config: Any, architecture: str) -> Iterator[tuple[str, Any]]:
    """Return the keys of latents. They make heads of keys and values look like one of a latent."""
    attends: list[bool] = []
    rope = getattr(config, "rope_parameters", None) or {}
    if architecture == "kimi-linear":
        attends = [kind == "full_attention" for kind in config.layer_types]
        yield "ssm.conv_kernel", config.linear_conv_kernel_dim
        yield "kda.head_dim", config.linear_head_dim
    elif architecture != "deepseek2":
        return
    if config.q_lora_rank is not None:
        yield "attention.q_lora_rank", config.q_lora_rank
    yield "attention.kv_lora_rank", config.kv_lora_rank
    yield "attention.head_count_kv", list(map(int, attends)) if attends else 1
    yield "attention.key_length", config.kv_lora_rank + config.qk_rope_head_dim
    yield "attention.value_length", config.kv_lora_rank
    yield "attention.key_length_mla", config.qk_nope_head_dim + config.qk_rope_head_dim
    yield "attention.value_length_mla", config.v_head_dim
    yield "rope.dimension_count", config.qk_rope_head_dim
    if (scale := rope.get("mscale_all_dim")) is not None:
        yield "rope.scaling.yarn_log_multiplier", 0.1 * scale
    if getattr(config, "norm_topk_prob", False):
        yield "expert_weights_norm", True
    if config.model_type in SIGMOID:
        yield "expert_gating_func", 2
    if config.model_type == "youtu":
        yield "leading_dense_block_count", config.num_hidden_layers
        yield "expert_feed_forward_length", config.intermediate_size
        yield "expert_shared_count", 0
    if config.model_type in ("glm4_moe_lite", "kimi_linear"):
        yield "leading_dense_block_count", config.mlp_layer_types.count("dense")


def tensors(name: str, numbers: Floats, config: Any) -> Iterator[tuple[str, Floats]]:
    """Return what a tensor is in the file: matrices of keys, transposed, and those of values."""
    if name.endswith("self_attn.conv1d.weight"):  # Kimi
        for part, channels in zip("qkv", np.split(numbers, 3), strict=True):
            yield name.replace("conv1d", f"{part}_conv1d"), channels[None]
        return
    if name.endswith("forget_gate.A_log"):
        yield name, -np.exp(numbers[0])
        return
    if not name.endswith("kv_b_proj.weight"):
        yield name, numbers
        return
    heads = numbers.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
    yield name.replace("kv_b", "k_b"), np.ascontiguousarray(keys.transpose(0, 2, 1))
    yield name.replace("kv_b", "v_b"), np.ascontiguousarray(values)
