"""What does not fit into memory is refused before it is read, with what would fit."""

import dataclasses
import logging
from pathlib import Path

import pytest
from engine_configs import execution_config
from random_decoders import WHOLE_BLOCKS, random_weights

from headrace.config.config import CPU_KV_BYTES
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cpu_executor import WeightDtype
from headrace.engine_proc.worker.execution.memory_check import check_weights, core_bytes
from headrace.errors import ConfigError

SPEC = dataclasses.replace(WHOLE_BLOCKS, layers=WHOLE_BLOCKS.layers * 2)
WEIGHTS = random_weights(SPEC)
WIDE = core_bytes(SPEC, WEIGHTS, WeightDtype.PACKED, True)
NARROW = core_bytes(SPEC, WEIGHTS, WeightDtype.INT8, True)


def check(memory: int, kv_bytes: int | None = None) -> None:
    config = execution_config(Path("model"), kv_cache_memory_bytes=kv_bytes)
    check_weights(config, SPEC, WEIGHTS, WeightDtype.PACKED, memory)


def test_weights_that_fit_pass() -> None:
    check(WIDE)
    check(WIDE + 64, kv_bytes=64)


def test_refused_weights_name_what_fits() -> None:
    with pytest.raises(ConfigError) as refused:
        check(WIDE - 1)
    text = str(refused.value)
    assert "its weights take 0.0 GiB" in text and "weights of at most 0.0 GiB fit" in text
    assert "with --quantization int8 they take" in text


def test_the_kv_cache_asked_for_counts() -> None:
    with pytest.raises(ConfigError, match="fit beside a KV cache of"):
        check(WIDE, kv_bytes=64)


def test_int8_is_named_only_where_it_fits() -> None:
    with pytest.raises(ConfigError) as refused:
        check(NARROW - 1)
    assert "int8" not in str(refused.value)


def test_a_default_kv_cache_that_cannot_fill_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(WIDE + CPU_KV_BYTES)
        assert not caplog.records
        check(WIDE + CPU_KV_BYTES - 1)
    assert "lower --kv-cache-memory-bytes" in caplog.text


def test_bfloat16_counts_as_the_twelve_bits_it_may_take() -> None:
    weights = random_weights(SPEC, Format.BF16)
    assert core_bytes(SPEC, weights, WeightDtype.PACKED, True) < WIDE / 2
