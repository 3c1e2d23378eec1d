"""A configuration can work, or one line says why not."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace.config.config import ServerConfig, config_of
from headrace.config.flag_values import flag_name
from headrace.config.process_configs import ExecutionConfig, ModelCard
from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("frontend_procs", 0, 1),
        ("frontend_procs", 65, 64),
        ("tokenizer_procs", 0, 1),
        ("tokenizer_procs", 17, 16),
        ("preprocess_procs", 0, 1),
        ("preprocess_procs", 9, 8),
        ("max_images", -1, 0),
        ("image_memory_bytes", 1 << 20, 16 << 20),
        ("detokenizer_procs", 0, 1),
        ("detokenizer_procs", 257, 256),
        ("max_num_seqs", 0, 1),
        ("max_body_bytes", 0, 1),
        ("max_body_bytes", 1 << 41, 1 << 40),
        ("max_model_len", 1, 2),
        ("port", -1, 0),
        ("port", 65536, 65535),
        ("seed", -1, 0),
        ("seed", 1 << 63, (1 << 63) - 1),
        ("kv_cache_memory_bytes", 10**23, (1 << 63) - 1),
    ],
)
def test_out_of_range_error_names_flag_value_and_limit(name: str, value: int, limit: int) -> None:
    fields: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"^{flag_name(name)} {value} .* {limit}$"):
        ServerConfig(**fields)
    ServerConfig(**(fields | {name: limit}))


@pytest.mark.parametrize("name", ["model", "host", "uds", "served_model_name", "allowed_origins"])
def test_a_text_that_is_not_utf_8_is_refused(name: str) -> None:
    text = b"a\xff".decode(errors="surrogateescape")
    value = (text,) if name == "allowed_origins" else text
    with pytest.raises(ConfigError, match=rf"^{flag_name(name)} 'a\\udcff' is not UTF-8$"):
        ServerConfig(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^--api-key is not UTF-8$"):
        ServerConfig(api_key=(text,))


def test_a_value_that_is_none_of_the_choices_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^--log-level loud is not known; it must be one of debug, "
    ):
        ServerConfig(log_level="loud")


def test_a_step_must_have_room_for_every_running_sequence() -> None:
    ServerConfig(max_num_seqs=8, max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 7 .*--max-num-seqs 8"):
        ServerConfig(max_num_seqs=8, max_num_batched_tokens=7)


@pytest.mark.parametrize(
    ("flags", "has_gpus", "sizes"),
    [
        ({}, False, (64, 512)),
        ({}, True, (256, 8192)),
        ({"device": "cpu"}, True, (64, 512)),
        ({"pp": 2}, True, (64, 512)),
        ({"device": "cuda"}, False, (256, 8192)),
        ({"max_num_seqs": 3}, True, (3, 8192)),
        ({"max_num_batched_tokens": 300}, True, (256, 300)),
    ],
)
def test_steps_are_larger_on_gpus_unless_flags_say_otherwise(
    flags: dict[str, Any], has_gpus: bool, sizes: tuple[int, int]
) -> None:
    config = config_of(flags, has_gpus)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == sizes


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("max_num_seqs", "many", "int"), ("tp", 1.5, "int"), ("api_key", "a key", "array")],
)
def test_a_value_of_another_type_is_refused(name: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag_name(name)}: Expected `{expected}`, got "):
        config_of({name: value}, has_gpus=False)


def test_json_may_come_from_programs_as_a_dict() -> None:
    config = config_of({"hf_overrides": {"architectures": ["x"]}}, has_gpus=False)
    assert config.hf_overrides == '{"architectures":["x"]}'


def test_values_come_from_programs_too() -> None:
    config = config_of({"api_key": ["a"], "chat_template": Path("a")}, has_gpus=False)
    assert (config.api_key, config.chat_template) == (("a",), "a")


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        ({}, (1, 0, 0)),
        ({"data_parallel_size_local": 1}, (1, 0, 0)),
        ({"data_parallel_backend": "ray"}, (0, 1, 1)),
        ({"data_parallel_backend": "ray", "data_parallel_size": 3}, (0, 3, 3)),
        (
            {"data_parallel_backend": "ray", "data_parallel_size": 3}
            | {"data_parallel_size_local": 1}
            | {"remote_engines": ("tcp://a:1",), "engine_key_file": "key"},
            (1, 2, 3),
        ),
    ],
)
def test_replicas_are_here_or_placed_by_ray(
    flags: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    config = ServerConfig(**flags)
    found = (config.num_own_engines, config.num_placed_engines, config.num_remote_engines)
    assert found == counts


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"data_parallel_size": 2, "data_parallel_size_local": 1}, "give --data-parallel-backend"),
        ({"data_parallel_size_local": 2}, "--data-parallel-size-local 2 is too large"),
        (
            {"data_parallel_backend": "ray", "engine_listen": "tcp://a:1"}
            | {"engine_key_file": "key"},
            "serves one engine of this machine",
        ),
        ({"data_parallel_backend": "ray", "enable_lora": True}, "have no adapters"),
        (
            {"address": "head:6379"},
            "--address head:6379 is of a Ray cluster; give --data-parallel-backend ray or ",
        ),
    ],
)
def test_replicas_that_cannot_be_placed_are_refused(flags: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ServerConfig(**flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "give --pp 2 or more"),
        ({"pp": 2, "tp": 2}, "does not go with --tp"),
        ({"pp": 2, "data_parallel_size": 2}, "does not go with --data-parallel-size"),
        ({"pp": 2, "data_parallel_backend": "ray"}, "does not go with --data-parallel-backend ray"),
        ({"pp": 2, "kv_store": "folder"}, "does not go with --kv-store;"),
        ({"pp": 2, "kv_store_bytes": 1}, "does not go with --kv-store-bytes"),
        ({"pp": 2, "engine": "mock"}, "does not go with --engine mock"),
        (
            {"pp": 2, "engine_listen": "tcp://a:1", "engine_key_file": "key"},
            "does not go with --engine-listen",
        ),
    ],
)
def test_stages_that_cannot_be_placed_are_refused(flags: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ServerConfig(distributed_executor_backend="ray", **flags)


def test_as_many_replicas_as_numa_nodes_are_not_for_ray() -> None:
    flags = {"data_parallel_size": "auto", "data_parallel_backend": "ray"}
    with pytest.raises(ConfigError, match=r"--data-parallel-size auto .* give their number"):
        config_of(flags, has_gpus=False, num_nodes=2)


def test_there_are_1_to_16_workers() -> None:
    ServerConfig(tp=16)
    with pytest.raises(ConfigError, match="--tp 0 is too small; it must be at least 1"):
        ServerConfig(tp=0)
    with pytest.raises(ConfigError, match="--tp 17 is too large; it must be at most 16"):
        ServerConfig(tp=17)


def test_int8_excludes_another_weight_precision() -> None:
    ServerConfig(quantization="int8")
    with pytest.raises(ConfigError, match="leave out --dtype bfloat16"):
        ServerConfig(quantization="int8", dtype="bfloat16")


def test_execution_config_holds_flags_and_model_limits() -> None:
    card = ModelCard(
        path="model.gguf",
        name="model",
        max_model_len=64,
        vocab_size=8,
        eos_token_ids=[],
        chat_template=None,
        special_tokens={},
        image_row_size=16,
    )
    config = ServerConfig(kv_cache_dtype="fp8", max_model_len=128, tp=2)
    of_model = {"model_path": "model.gguf", "max_model_len": 64, "vocab_size": 8}
    of_card = {"image_row_size": 16, "is_prefix_lm": False}
    execution = dataclasses.asdict(ExecutionConfig.of(config, card))
    flags = dataclasses.asdict(config)
    for name, value in (of_model | of_card | {"reserved_bytes": 0}).items():
        assert execution.pop(name) == value
    assert execution == {name: flags[name] for name in execution}
