"""Flags become a configuration that can work, or one line that says why not."""

import dataclasses
from typing import Any

import pytest

from headrace.config import ServerConfig, flag_name, from_flags, server_parser
from headrace.errors import ConfigError


def test_no_flags_are_the_defaults() -> None:
    assert from_flags([]) == ServerConfig()


def test_every_field_is_a_flag_with_help() -> None:
    text = server_parser().format_help()
    for field in dataclasses.fields(ServerConfig):
        assert field.metadata["help"]
        if field.name != "model":
            assert flag_name(field.name) in text


def test_flags_have_the_types_of_their_fields() -> None:
    config = from_flags(["org/model", "--max-model-len", "128", "--served-model-name", "5"])
    assert (config.model, config.max_model_len, config.served_model_name) == ("org/model", 128, "5")


@pytest.mark.parametrize(
    "argv",
    [["--nonsense", "1"], ["--max-num", "1"], ["--port", "x"], ["--dtype", "int3"], ["a", "b"]],
)
def test_what_is_no_flag_ends_the_program(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        from_flags(argv)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("frontend_procs", 0, 1),
        ("frontend_procs", 65, 64),
        ("tokenizer_procs", 0, 1),
        ("tokenizer_procs", 17, 16),
        ("detokenizer_procs", 0, 1),
        ("detokenizer_procs", 257, 256),
        ("max_num_seqs", 0, 1),
        ("max_body_bytes", 0, 1),
        ("max_model_len", 1, 2),
        ("port", -1, 0),
        ("port", 65536, 65535),
        ("seed", -1, 0),
    ],
)
def test_a_value_out_of_range_is_refused_with_flag_value_and_limit(
    name: str, value: int, limit: int
) -> None:
    fields: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"^{flag_name(name)} {value} .* {limit}$"):
        ServerConfig(**fields)
    ServerConfig(**(fields | {name: limit}))


def test_a_value_that_is_none_of_the_choices_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^--log-level loud is not known; it must be one of debug, "
    ):
        ServerConfig(log_level="loud")


def test_a_step_must_have_room_for_every_running_sequence() -> None:
    ServerConfig(max_num_seqs=8, max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 7 .*--max-num-seqs 8"):
        ServerConfig(max_num_seqs=8, max_num_batched_tokens=7)


def test_tensor_parallelism_is_refused_for_now() -> None:
    with pytest.raises(ConfigError, match="--tp 2"):
        ServerConfig(tp=2)


def test_int8_and_another_precision_of_weights_are_not_both_possible() -> None:
    ServerConfig(quantization="int8")
    with pytest.raises(ConfigError, match="leave out --dtype bfloat16"):
        ServerConfig(quantization="int8", dtype="bfloat16")
