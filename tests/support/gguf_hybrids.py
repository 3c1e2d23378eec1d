"""What the converter of llama.cpp writes of hybrids, beside what other models have."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
ARCHITECTURES = {
    "lfm2_moe": "lfm2moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
DELTA_NETS = {"qwen3next", "qwen35", "qwen35moe"}
NAMES = {  # those of mixtures have been replaced before
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "mlp.w1": "ffn_gate",
    "mlp.w2": "ffn_down",
    "mlp.w3": "ffn_up",
    "mlp.expert_bias": "exp_probs_b.bias",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
}


def metadata(config: Any, architecture: str) -> Iterator[tuple[str, Any]]:
    """Return the keys of convolutions."""
    if architecture in DELTA_NETS:
        yield "full_attention_interval", 1 + config.layer_types.index("full_attention")
        yield "ssm.conv_kernel", config.linear_conv_kernel_dim
        yield "ssm.state_size", config.linear_key_head_dim
        yield "ssm.group_count", config.linear_num_key_heads
        yield "ssm.time_step_rank", config.linear_num_value_heads
        yield "ssm.inner_size", config.linear_value_head_dim * config.linear_num_value_heads
    if architecture in ("qwen35", "qwen35moe"):
        yield "rope.dimension_sections", [11, 11, 10, 0]
    if architecture not in ("lfm2", "lfm2moe"):
        return
    attends = [kind == "full_attention" for kind in config.layer_types]
    yield "attention.head_count_kv", [config.num_key_value_heads if a else 0 for a in attends]
    yield "shortconv.l_cache", config.conv_L_cache
    if architecture == "lfm2moe":
        yield "leading_dense_block_count", config.num_dense_layers
        yield "expert_gating_func", 2


def delta_tensors(
    config: Any, architecture: str, name: str, numbers: Floats
) -> Iterator[tuple[str, Floats]]:
    """Return what a tensor of a gated delta net is in the file, still under transformers' names."""
    if architecture not in DELTA_NETS:
        yield name, numbers
        return
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        numbers = numbers + 1
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    if name.endswith("in_proj_qkvz.weight"):
        group = values // keys * value_dim
        q, k, v, z = np.split(
            numbers.reshape(keys, -1, numbers.shape[1]),
            [key_dim, 2 * key_dim, 2 * key_dim + group],
            axis=1,
        )
        parts = [part.reshape(-1, numbers.shape[1]) for part in (q, k, v)]
        yield name.replace("qkvz", "qkv"), np.concatenate(parts)
        yield name.replace("qkvz", "z"), np.ascontiguousarray(z.reshape(-1, numbers.shape[1]))
        return
    if name.endswith("conv1d.weight"):
        numbers = numbers[:, 0]
    if "linear_attn." in name and architecture != "qwen3next":
        numbers = tiled(numbers, name, keys, values, 2 * keys * key_dim)
    yield name, -np.exp(numbers) if name.endswith("A_log") else numbers


def tiled(numbers: Floats, name: str, keys: int, values: int, first: int) -> Floats:
    """Sort value heads by their place among those of their key head."""
    order = np.arange(values).reshape(keys, -1).T.reshape(-1)
    part = name.split("linear_attn.")[1]
    if part == "norm.weight":
        return numbers
    if part == "out_proj.weight":
        return np.ascontiguousarray(tiled(numbers.T, "linear_attn.", keys, values, 0).T)
    if not part.startswith(("in_proj_qkv.", "conv1d")):
        first = 0
    heads = numbers[first:].reshape(values, -1)[order]
    return np.concatenate([numbers[:first], heads.reshape(numbers[first:].shape)])
