"""The configurations of a server's models: the server's flags, and those of each model."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.config.config import ServerConfig, config_of
from headrace.config.flag_values import flag_name
from headrace.errors import ConfigError

# Flags that a model may have for itself, beside others with other values.
OF_MODEL = frozenset(
    {
        "model",
        "served_model_name",
        "tp",
        "pp",
        "data_parallel_size",
        "disable_custom_all_reduce",
        "enforce_eager",
        "cudagraph_capture_sizes",
        "max_model_len",
        "device",
        "model_impl",
        "load_format",
        "hf_overrides",
        "dtype",
        "quantization",
        "attention_backend",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_queued",
        "scheduling_policy",
        "target_itl_ms",
        "enable_prefix_caching",
        "async_scheduling",
        "speculative",
        "draft_model",
        "num_speculative_tokens",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "kv_cache_dtype",
        "tokenizer_mode",
        "chat_template",
        "max_images",
        "tool_call_parser",
        "reasoning_parser",
        "generation_config",
    }
)
# Flags that suit one model, and so stand with it where there are several.
OF_ONE_MODEL = ("served_model_name", "hf_overrides", "draft_model", "chat_template")
# What goes with one model alone, and what there is without it.
ALONE = (
    "mmproj",
    "enable_lora",
    "kv_store",
    "kv_store_bytes",
    "kv_events_config",
    "record",
    "remote_engines",
    "engine_listen",
)


def configs_of(
    values: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], has_gpus: bool, num_nodes: int
) -> list[ServerConfig]:
    """Return the configuration of each model.

    Args:
        values: flags of the server and of all its models.
        parts: of each model; none is one model, the demo's.
        has_gpus: as `config_of` has it, like the next.

    Raises:
        ConfigError: a flag has a value that cannot work, or does not go with several models.
    """
    if len(parts) > 1:
        check_several(values)
    configs = [config_of({**values, **part}, has_gpus, num_nodes) for part in parts or [{}]]
    on_gpus = [c for c in configs if c.may_use_gpus(has_gpus)]
    most = configs[0].max_loaded_models
    shares = sorted((config.gpu_memory_utilization for config in on_gpus), reverse=True)
    shares = shares if most is None else shares[:most]
    share = sum(shares)
    if len(shares) > 1 and share > 1:
        raise ConfigError(
            f"--gpu-memory-utilization of {len(shares)} models on the same GPU is {share:g} "
            "together; it must be at most 1"
        )
    return configs


def check_several(values: Mapping[str, Any]) -> None:
    """Refuse flags that do not go with several models."""
    for name in ALONE:
        if values.get(name):
            raise ConfigError(
                f"{flag_name(name)} goes with one model; run a server for each, or leave it out"
            )
    for name in ("data_parallel_backend", "distributed_executor_backend"):
        if values.get(name, "mp") != "mp":
            raise ConfigError(f"{flag_name(name)} ray goes with one model; run a server for each")
    for name in OF_ONE_MODEL:
        if values.get(name) is not None:
            raise ConfigError(
                f"{flag_name(name)} is for one of several models; give it below models in --config"
            )
