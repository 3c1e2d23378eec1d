"""Configs of engines that tests start."""

import dataclasses
from typing import Any

from headrace.config.config import CrashConfig, EngineConfig

CONFIG = EngineConfig(
    run_dir="",
    model_path="",
    max_model_len=64,
    num_detokenizers=2,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_num_queued=100,
    scheduling_policy="fcfs",
    target_itl_ms=100,
    enable_prefix_caching=True,
    async_scheduling=None,
    speculative="off",
    quantization="none",
    engine="auto",
    mock_profile="zero",
    embedding_size=None,
    tp=1,
    device="auto",
    model_impl="auto",
    load_format="auto",
    dtype="auto",
    kv_cache_dtype="auto",
    kv_cache_memory_bytes=0,
    vocab_size=8,
    eos_token_ids=[],
    crash=CrashConfig(directory=None, flags={}),
)


def engine_config(**changes: Any) -> EngineConfig:
    """Return the config of a small engine, some of its fields changed."""
    return dataclasses.replace(CONFIG, **changes)
