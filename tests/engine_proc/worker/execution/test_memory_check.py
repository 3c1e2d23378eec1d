"""What does not fit into memory is refused before it is read, with what would fit."""

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from engine_configs import execution_config
from random_decoders import (
    MAMBA2,
    NUM_PAGES,
    WHOLE_BLOCKS,
    batch,
    random_eagle,
    random_weights,
    with_mixture,
)

from headrace.config.config import CPU_KV_BYTES
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution import memory_check
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, matrix_bytes
from headrace.engine_proc.worker.execution.held_matrices import WeightDtype
from headrace.engine_proc.worker.execution.memory_check import (
    adapter_bytes,
    check_weights,
    core_bytes,
    step_bytes,
    weights_of_all,
)
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, LayerSpec
from headrace.engine_proc.worker.models.tower_memory import TowerMemory
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.stages.stage import models_of
from headrace.errors import ConfigError

SPEC = dataclasses.replace(WHOLE_BLOCKS, layers=WHOLE_BLOCKS.layers * 2)
WEIGHTS = random_weights(SPEC)
MODEL = DecoderModel(SPEC, WEIGHTS, ())
WIDE = core_bytes(SPEC, WEIGHTS, WeightDtype.PACKED, True)
NARROW = core_bytes(SPEC, WEIGHTS, WeightDtype.INT8, True)
CONFIG = execution_config(Path("model"))
STEP = step_bytes(SPEC, CONFIG.max_num_batched_tokens)


def check(memory: int, kv_bytes: int | None = None, **flags: Any) -> None:
    config = execution_config(Path("model"), kv_cache_memory_bytes=kv_bytes, **flags)
    check_weights(config, models_of(MODEL, config.pp), WeightDtype.PACKED, memory)


def test_weights_that_fit_pass() -> None:
    check(WIDE + STEP)
    check(WIDE + STEP + 64, kv_bytes=64)


def test_refused_weights_name_what_fits() -> None:
    with pytest.raises(ConfigError) as refused:
        check(WIDE + STEP - 1)
    text = str(refused.value)
    assert "its weights take 0.0 GiB" in text and "weights of at most 0.0 GiB fit" in text
    assert "with --quantization int8 they take" in text
    assert "with a lower --max-num-batched-tokens they fit" in text


def test_stages_count_a_tied_embedding_twice_and_a_step_each() -> None:
    embedding = matrix_bytes(Format.F32, (SPEC.vocab_size, SPEC.hidden_size))
    for pp, tp, num_links in ((2, 1, 1), (3, 2, 4)):
        frames = num_links * pp * 4 * CONFIG.max_num_batched_tokens * SPEC.hidden_size
        needed = WIDE + embedding + pp * STEP + frames
        check(needed, pp=pp, tp=tp)
        with pytest.raises(ConfigError, match="with a lower --max-num-batched-tokens they fit"):
            check(needed - 1, pp=pp, tp=tp)


def test_a_head_of_its_own_is_in_one_stage() -> None:
    spec = dataclasses.replace(SPEC, tied_head=False)
    config, model = execution_config(pp=2), DecoderModel(spec, random_weights(spec), ())
    once, staged = (weights_of_all(config, models_of(model, n), WeightDtype.PACKED) for n in (1, 2))
    assert staged == once


def test_the_kv_cache_asked_for_counts() -> None:
    with pytest.raises(ConfigError, match=r"fit beside a step of \d+ tokens .* and a KV cache of"):
        check(WIDE + STEP, kv_bytes=64)


def test_a_vision_tower_is_named_where_the_rest_would_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_check, "tower_memory", lambda _config: TowerMemory(0, 7))
    with pytest.raises(ConfigError, match="with --max-images 0 a vision tower of"):
        check(WIDE + STEP - 7)
    with pytest.raises(ConfigError) as refused:
        check(WIDE + STEP - 8)
    assert "--max-images" not in str(refused.value)


def test_int8_is_named_only_where_it_fits() -> None:
    with pytest.raises(ConfigError) as refused:
        check(NARROW + STEP - 1)
    assert "int8" not in str(refused.value)


def test_adapters_that_may_be_held_count() -> None:
    flags = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 5, "max_lora_rank": 32}
    adapters = adapter_bytes(execution_config(**flags), SPEC, WEIGHTS)
    check(WIDE + STEP + adapters, **flags)
    with pytest.raises(ConfigError) as refused:
        check(WIDE + STEP + adapters - 1, **flags)
    assert "and 5 adapters of rank 32 (0.0 GiB)" in str(refused.value)
    assert "with a lower --max-cpu-loras, --max-loras or --max-lora-rank" in str(refused.value)
    check(WIDE + STEP, **flags | {"enable_lora": False})


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_an_adapter_is_reckoned_with_its_gains(dtype: str, size: int) -> None:
    rank, tokens, hidden, inner = 32, SPEC.vocab_size, SPEC.hidden_size, SPEC.intermediate_size
    keys, queries = SPEC.num_kv_heads * SPEC.head_dim, SPEC.num_heads * SPEC.head_dim
    of_layer = [(queries, hidden), *[(keys, hidden)] * 2, (hidden, queries)]
    of_layer += [*[(inner, hidden)] * 2, (hidden, inner)]
    shapes = [(tokens, hidden), *of_layer * len(SPEC.layers)]
    flags = {"max_loras": 1, "max_lora_rank": rank, "lora_dtype": dtype, "enable_lora": True}
    reckoned = adapter_bytes(execution_config(**flags), SPEC, WEIGHTS)
    padded = [(-(-rows // 16) * 16, cols) for rows, cols in shapes]
    factors = sum(size * rank * (rows + cols) for rows, cols in padded)
    assert reckoned == factors + 4 * sum(rows for rows, _ in shapes)


WIDE_MAMBA2 = dataclasses.replace(
    MAMBA2, num_heads=32, head_dim=64, state_size=64, num_groups=8, norm_size=0
)


@pytest.mark.parametrize(
    ("spec", "is_drafted"),
    [
        (with_mixture(num_experts=16, experts_per_token=8, intermediate_size=256), False),
        (dataclasses.replace(SPEC, layers=(LayerSpec(mixer=WIDE_MAMBA2), LayerSpec())), False),
        (SPEC, True),
    ],
    ids=["mixture", "mamba2", "eagle"],
)
def test_a_step_s_activations_take_what_is_reckoned(spec: DecoderSpec, is_drafted: bool) -> None:
    """In bf16, whose rounded rows are kept beside those that are not."""
    spec = dataclasses.replace(spec, hidden_size=512)
    options: dict[str, Any] = {"num_pages": NUM_PAGES, "page_tokens": 16, "threads": 1}
    executor = CpuExecutor(
        spec,
        random_weights(spec, Format.BF16),
        num_states=4 if spec.state_numbers else 0,
        rounds_activations=True,
        **options,
    )
    if is_drafted:
        random_eagle(executor, **options)
    tokens = batch([(sequence, 0, 256) for sequence in range(4)])
    step = dataclasses.replace(
        tokens,
        logit_rows=tokens.logit_rows[:1],
        state_in=np.full(4, -1, np.int32),
        state_out=np.arange(4, dtype=np.int32),
    )
    before = psutil.Process().memory_info().rss
    executor.forward(step)
    taken = psutil.Process().memory_info().rss - before
    reckoned = step_bytes(spec, len(step.token_ids), is_drafted)
    assert 0.5 * reckoned < taken < 1.2 * reckoned


def test_a_default_kv_cache_that_cannot_fill_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(WIDE + STEP + CPU_KV_BYTES)
        assert not caplog.records
        check(WIDE + STEP + CPU_KV_BYTES - 1)
    assert "lower --kv-cache-memory-bytes" in caplog.text


def test_bfloat16_counts_as_the_twelve_bits_it_may_take() -> None:
    weights = random_weights(SPEC, Format.BF16)
    assert core_bytes(SPEC, weights, WeightDtype.PACKED, True) < WIDE / 2


def test_matrices_of_layers_in_16_bits_count_as_half() -> None:
    of_layers = 4 * sum(
        math.prod(shape)
        for name, shape in weight_shapes(SPEC).items()
        if name.startswith("layers.") and len(shape) == 2
    )
    saved = WIDE - core_bytes(SPEC, WEIGHTS, WeightDtype.FIXED16, False)
    assert 0.4 * of_layers < saved < 0.5 * of_layers, "scales take the rest"
