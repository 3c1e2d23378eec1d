"""What the converter of llama.cpp writes of LFM2, beside what other models have."""

from collections.abc import Iterator
from typing import Any

ARCHITECTURES = {"lfm2_moe": "lfm2moe"}
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
}


def metadata(config: Any, architecture: str) -> Iterator[tuple[str, Any]]:
    """Return the keys of convolutions."""
    if architecture not in ("lfm2", "lfm2moe"):
        return
    attends = [kind == "full_attention" for kind in config.layer_types]
    yield "attention.head_count_kv", [config.num_key_value_heads if a else 0 for a in attends]
    yield "shortconv.l_cache", config.conv_L_cache
    if architecture == "lfm2moe":
        yield "leading_dense_block_count", config.num_dense_layers
        yield "expert_gating_func", 2
