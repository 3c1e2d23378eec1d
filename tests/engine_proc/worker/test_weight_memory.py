"""How a GGUF file's weights are executed is foreseen, with their memory."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from engine_configs import execution_config
from random_decoders import LATENTS, MIXTURES, random_weights

from headrace.config.model_card import find_demo_model
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cpu_executor import matrix_bytes
from headrace.engine_proc.worker.execution.held_matrices import FORMATS
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.weight_memory import (
    HeldWeights,
    foresee_memory,
    foresee_second_embedding,
    on_gpu,
)

TYPES = {name: gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q8_0")}


def write_model(path: Path) -> Path:
    """Write a Llama with a matrix of each type."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, kind in (
        ("token_embd", "F32"),
        ("output", "F16"),
        ("blk.0.attn_q", "BF16"),
        ("blk.0.attn_k", "BF16"),
        ("blk.0.attn_v", "Q4_0"),
        ("blk.0.attn_output", "Q8_0"),
        *((f"blk.0.ffn_{part}", "Q4_0") for part in ("gate", "up", "down")),
    ):
        data = gguf.quantize(np.ones((64, 64), np.float32), TYPES[kind])
        writer.add_tensor(f"{name}.weight", data, raw_dtype=TYPES[kind])
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        (
            {},
            [
                ("F32", "as stored", 4, 64 * 4 * 67, 64 * 4 * 67),
                ("F16", "decoded to F32", 1, 64 * 64 * 2, 64 * 64 * 4),
                ("BF16", "as stored", 2, 64 * 64 * 4, 64 * 64 * 4),
                ("Q4_0", "as stored", 4, 4 * 64 * 36, 4 * 64 * 36),
                ("Q8_0", "as stored, as int8", 1, 64 * 68, 64 * 68),
            ],
        ),
        (
            {"quantization": "int8"},
            [
                ("Q4_0", "rounded to int8", 4, 64 * 144, 64 * 272),
                ("BF16", "rounded to int8", 2, 64 * 256, 64 * 136),
                ("F32", "rounded to int8", 1, 64 * 256, 64 * 68),
                ("F16", "rounded to int8", 1, 64 * 128, 64 * 68),
                ("Q8_0", "as stored, as int8", 1, 64 * 68, 64 * 68),
                ("F32", "as stored", 3, 64 * 12, 64 * 12),
            ],
        ),
    ],
)
def test_each_type_is_told_as_it_is_executed(
    flags: dict[str, str], rows: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    found = foresee_memory(execution_config(path, device="cpu", **flags))
    assert [(one.stored, one.how, *one[2:]) for one in found] == rows


def test_weights_on_gpus_are_of_one_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = write_model(tmp_path / "tiny.gguf")
    found = foresee_memory(execution_config(path, device="cuda"))
    assert sum(one.held_bytes for one in found) == 2 * (9 * 64 * 64 + 3 * 64)
    assert {one.how for one in found if one.stored != "BF16"} == {"rounded to BF16"}
    assert HeldWeights("BF16", "as stored", 2, 64 * 256, 64 * 256) in found
    found = foresee_memory(execution_config(path, device="cuda", quantization="fp8"))
    assert sum(one.held_bytes for one in found) == 7 * 64 * 64 + 2 * (2 * 64 * 64 + 3 * 64)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_experts_in_mxfp4_stay_so_on_gpus(quantization: str) -> None:
    spec = MIXTURES["mixtral"]
    model = DecoderModel(spec, random_weights(spec, Format.MXFP4), ())
    config = execution_config(quantization=quantization)
    found = dict(zip(model.weights, on_gpu(config, model), strict=True))
    expert = found["layers.0.experts.0.up"]
    assert expert.how == "as stored" and expert.held_bytes == expert.stored_bytes
    assert found["layers.0.q"].executed == ("BF16" if quantization == "none" else "F8_E4M3")
    assert found["layers.0.router"].executed == "BF16"


def test_matrices_of_heads_are_not_rounded_on_gpus() -> None:
    spec = LATENTS["deepseek"]
    model = DecoderModel(spec, random_weights(spec), ())
    held = on_gpu(execution_config(quantization="fp8"), model)
    found = {name: one.executed for name, one in zip(model.weights, held, strict=True)}
    assert [found[f"layers.0.{name}"] for name in ("k_b", "v_b", "o")] == ["BF16"] * 2 + ["F8_E4M3"]


def test_a_folder_has_no_table_of_types(tmp_path: Path) -> None:
    assert foresee_memory(execution_config(tmp_path)) == []


def test_all_weights_of_a_file_are_counted() -> None:
    path = find_demo_model()
    assert path is not None
    found = foresee_memory(execution_config(path, device="cpu"))
    stored = sum(one.stored_bytes for one in found)
    assert 0.95 * path.stat().st_size < stored < path.stat().st_size


@pytest.mark.parametrize("format", FORMATS)
def test_a_packed_matrix_takes_whole_blocks_of_rows(format: Any) -> None:
    assert matrix_bytes(format, (17, 256)) == matrix_bytes(format, (32, 256)) > 0


def test_the_last_stage_has_a_tied_embedding_once_more() -> None:
    demo = find_demo_model()
    assert demo is not None
    assert foresee_second_embedding(execution_config(demo)) == 0
    (table,) = (one for one in foresee_memory(execution_config(demo)) if one.stored == "Q8_0")
    assert foresee_second_embedding(execution_config(demo, pp=2)) == table.held_bytes


def test_of_stages_elsewhere_the_first_one_counts() -> None:
    demo = find_demo_model()
    assert demo is not None
    apart = execution_config(demo, pp=2, distributed_executor_backend="ray")
    assert foresee_second_embedding(apart) == 0
    own, whole = (
        sum(one.held_bytes for one in foresee_memory(config))
        for config in (apart, execution_config(demo))
    )
    assert 0.4 * whole < own < 0.8 * whole
