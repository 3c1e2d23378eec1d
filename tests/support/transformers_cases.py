"""Small models for transformers' modules, texts, and batches of these."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.engine_proc.worker.execution.executor import Batch

NUM_POSITIONS = 64
PAGE_TOKENS = 4
TEXTS = [[17, 3, 94, 55, 8, 61, 42, 7, 23, 88, 31], [12, 70, 5], [64, 29, 33, 71, 9, 10, 2]]
PAGES = np.arange(15, dtype=np.int32).reshape(5, 3).T  # [sequences, pages]

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": NUM_POSITIONS,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
# Rotated and plain parts of a head, and values narrower than keys.
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
CASES: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS | {"head_dim": 24},
    "olmoe": EXPERTS,
    "deepseek_v3": LATENT,
    "gpt_oss": EXPERTS | {"head_dim": 16, "sliding_window": 5},  # sinks, and a window
    "phimoe": EXPERTS,
    "hunyuan_v1_moe": EXPERTS | {"head_dim": 16, "moe_topk": 2},
    "gpt2": {"n_positions": NUM_POSITIONS},  # learned positions
    "gpt_neox": {"rotary_pct": 0.25},
    "phi": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": 5},
}


def flatten(parts: Sequence[tuple[int, int, list[int]]]) -> Batch:
    """Return new tokens of some sequences, from a position on; the last of each have logits."""
    counts = [len(tokens) for _, _, tokens in parts]
    positions = [np.arange(start, start + len(tokens)) for _, start, tokens in parts]
    return Batch(
        token_ids=np.concatenate([tokens for _, _, tokens in parts]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        sequences=np.repeat([s for s, _, _ in parts], counts).astype(np.int32),
        page_table=PAGES,
        logit_rows=(np.cumsum(counts) - 1).astype(np.int32),
    )
