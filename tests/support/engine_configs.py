"""Configs of engines that tests start, and of how models are executed."""

import dataclasses
from pathlib import Path
from typing import Any

from headrace.config.config import ServerConfig
from headrace.config.process_configs import CrashConfig, EngineConfig, ExecutionConfig, ModelCard

CARD = ModelCard(
    path="",
    name="tiny",
    max_model_len=64,
    vocab_size=8,
    eos_token_ids=[],
    chat_template=None,
    special_tokens={},
)
EXECUTION = dataclasses.replace(
    ExecutionConfig.of(ServerConfig(), CARD),
    max_num_seqs=2,
    max_num_batched_tokens=64,
    kv_cache_memory_bytes=0,
)
EXECUTION_FIELDS = {f.name for f in dataclasses.fields(ExecutionConfig)}
CONFIG = EngineConfig(
    run_dir="",
    execution=EXECUTION,
    num_detokenizers=2,
    max_num_queued=100,
    scheduling_policy="fcfs",
    target_itl_ms=100,
    enable_prefix_caching=True,
    async_scheduling=None,
    num_speculative_tokens=15,
    engine="auto",
    mock_profile="zero",
    embedding_size=None,
    eos_token_ids=[],
    crash=CrashConfig(directory=None, flags={}),
)


def execution_config(path: Path | str = "", **changes: Any) -> ExecutionConfig:
    """Return how a model at a path is executed: the defaults of flags, some of them changed."""
    return dataclasses.replace(EXECUTION, model_path=str(path), **changes)


def engine_config(**changes: Any) -> EngineConfig:
    """Return the config of a small engine; changes are of its fields and of its execution's."""
    of_execution = {name: value for name, value in changes.items() if name in EXECUTION_FIELDS}
    rest = {name: value for name, value in changes.items() if name not in EXECUTION_FIELDS}
    execution = dataclasses.replace(EXECUTION, **of_execution)
    return dataclasses.replace(CONFIG, execution=execution, **rest)
