"""Adapters in files: what each is for a model, and what is refused and why."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from random_decoders import MIXTURES, SPEC, random_weights
from safetensors.numpy import save_file

from headrace.engine_proc.worker.adapters.adapter_opener import AdaptedModel, open_adapter
from headrace.engine_proc.worker.adapters.factors import AdapterRefused
from headrace.engine_proc.worker.models.mtp import with_mtp_layer
from headrace.engine_proc.worker.parallel.shard import shards

RANK = 4
MODEL = AdaptedModel(SPEC, random_weights(SPEC), is_gguf=False, max_rank=8)
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"
SHAPES = {Q: (96, 96), DOWN: (96, 160)}  # of their weights
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6}
Tensors = dict[str, Any]


def tensors(shapes: dict[str, tuple[int, int]] = SHAPES, rank: int = RANK) -> Tensors:
    rng = np.random.default_rng(0)
    return {
        f"base_model.model.{module}.lora_{part}.weight": rng.standard_normal(shape, np.float32)
        for module, (rows, cols) in shapes.items()
        for part, shape in (("A", (rank, cols)), ("B", (rows, rank)))
    }


def write(folder: Path, tensors: Tensors, **config: Any) -> Path:
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(msgspec.json.encode(CONFIG | config))
    return folder


def test_modules_become_weights(tmp_path: Path) -> None:
    given = tensors()
    found = open_adapter(write(tmp_path, given), MODEL)
    assert found.keys() == {"layers.1.q", "layers.0.down"}
    expected = (
        1.5
        * given[f"base_model.model.{Q}.lora_B.weight"]
        @ (given[f"base_model.model.{Q}.lora_A.weight"])
    )
    np.testing.assert_allclose(found["layers.1.q"].delta, expected, rtol=1e-5)


def test_model_with_a_layer_that_drafts_takes_adapters(tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, spec=with_mtp_layer(SPEC))
    found = open_adapter(write(tmp_path, tensors()), model)
    assert found.keys() == {"layers.1.q", "layers.0.down"}


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"use_rslora": True}, (3.0, 3.0)),
        ({"alpha_pattern": {"down_proj": 2}}, (1.5, 0.5)),
        ({"alpha_pattern": {r".*\.layers\.0\.mlp\.down_proj": 2}}, (1.5, 0.5)),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 2}}, (0.5, 1.5)),
        ({"alpha_pattern": {"proj": 2, "own_proj": 3}}, (1.5, 1.5)),
    ],
)
def test_scale_is_peft_s(
    tmp_path: Path, config: dict[str, Any], scales: tuple[float, float]
) -> None:
    found = open_adapter(write(tmp_path, tensors(), **config), MODEL)
    assert (found["layers.1.q"].scale, found["layers.0.down"].scale) == scales


def test_fused_modules_are_parts(tmp_path: Path) -> None:
    shapes = {
        "model.layers.0.self_attn.qkv_proj": (160, 96),
        "model.layers.0.mlp.gate_up_proj": (320, 96),
    }
    given = tensors(shapes)
    found = open_adapter(write(tmp_path, given), MODEL)
    b = given["base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"]
    np.testing.assert_array_equal(
        np.concatenate([found[f"layers.0.{name}"].b.to_float32() for name in "qkv"]), b
    )
    assert found["layers.0.up"].b.shape[0] == 160


def test_magnitudes_become_gains(tmp_path: Path) -> None:
    given = tensors({DOWN: SHAPES[DOWN]})
    magnitude = np.linspace(1, 2, 96, dtype=np.float32)
    given[f"base_model.model.{DOWN}.lora_magnitude_vector"] = magnitude
    found = open_adapter(write(tmp_path, given, use_dora=True), MODEL)["layers.0.down"]
    whole = MODEL.weights["layers.0.down"].to_float32() + found.delta
    assert found.gain is not None
    np.testing.assert_allclose(found.gain * np.linalg.norm(whole, axis=1), magnitude, rtol=1e-5)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_embedding_and_head_may_be_whole(tmp_path: Path, num_workers: int) -> None:
    rng = np.random.default_rng(0)
    vocab, hidden = SPEC.vocab_size, SPEC.hidden_size
    module = "base_model.model.model.embed_tokens"
    a, b = rng.random((RANK, vocab), np.float32), rng.random((hidden, RANK), np.float32)
    head = rng.random((vocab, hidden), np.float32)
    given = {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
    given[f"{module}.base_layer.weight"] = given["base_model.model.lm_head.weight"] = head
    path = write(tmp_path, given, modules_to_save=["lm_head"])
    workers = shards(SPEC, MODEL.weights, num_workers) if num_workers > 1 else [None]
    parts = [open_adapter(path, dataclasses.replace(MODEL, shard=shard)) for shard in workers]
    got = {name: np.concatenate([part[name].delta for part in parts]) for name in ("embed", "head")}
    np.testing.assert_allclose(got["embed"], 1.5 * (b @ a).T, rtol=1e-5)
    base = MODEL.weights["head" if "head" in MODEL.weights else "embed"].to_float32()
    np.testing.assert_allclose(got["head"] + base, head, atol=1e-5)


@pytest.mark.parametrize("use_dora", [False, True])
def test_shares_of_workers_are_the_whole(tmp_path: Path, use_dora: bool) -> None:
    given = tensors()
    if use_dora:
        for module in SHAPES:
            name = f"base_model.model.{module}.lora_magnitude_vector"
            given[name] = np.linspace(1, 2, 96, dtype=np.float32)
    path = write(tmp_path, given, use_dora=use_dora)
    whole = open_adapter(path, MODEL)
    parts = [
        open_adapter(path, dataclasses.replace(MODEL, shard=shard))
        for shard in shards(SPEC, MODEL.weights, 2)
    ]
    rows = [part["layers.1.q"].delta for part in parts]
    np.testing.assert_allclose(np.concatenate(rows), whole["layers.1.q"].delta, rtol=1e-4)
    columns = [part["layers.0.down"].delta for part in parts]
    np.testing.assert_allclose(
        np.concatenate(columns, axis=1), whole["layers.0.down"].delta, rtol=1e-4, atol=1e-5
    )
    if use_dora:
        gains = [part["layers.1.q"].gain for part in parts]
        np.testing.assert_array_equal(np.concatenate(gains), whole["layers.1.q"].gain)


def with_nan_shape(given: Tensors) -> Tensors:
    return given | {f"base_model.model.{Q}.lora_A.weight": np.zeros((RANK, 95), np.float32)}


REFUSED: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "wrong width": (with_nan_shape(tensors()), {}, r"is \[96, 95\] in the adapter, and \[96, 96\]"),
    "high rank": (tensors(rank=9), {}, "has rank 9; --max-lora-rank is 8"),
    "no such layer": (
        tensors({"model.layers.7.self_attn.q_proj": (96, 96)}),
        {},
        "no linear layer",
    ),
    "an embedding": (tensors({"model.embed_tokens": (111, 96)}), {}, r"\[111, 96\] in the adapter"),
    "no embedding": (
        {
            "base_model.model.model.embed_tokens.lora_embedding_A": np.zeros(3, np.float32),
            "base_model.model.model.embed_tokens.lora_embedding_B": np.zeros(3, np.float32),
        },
        {},
        "only one of lora_A",
    ),
    "half": ({k: v for k, v in tensors().items() if "lora_A" in k}, {}, "only one of lora_A"),
    "a whole module": ({"base_model.model.lm_head.weight": np.zeros((2, 2))}, {}, "stored as F64"),
    "nothing": ({}, {}, "has no tensors"),
    "another method": (tensors(), {"peft_type": "LOHA"}, "'LOHA'; only LORA"),
    "biases": (tensors(), {"bias": "all"}, "trained biases are not supported"),
    "a whole layer": (
        {f"base_model.model.{Q}.weight": np.zeros((96, 96), np.float32)},
        {"modules_to_save": ["q_proj"]},
        "only the embedding and the head can be whole",
    ),
    "a narrow head": (
        {"base_model.model.lm_head.weight": np.zeros((96, 95), np.float32)},
        {"modules_to_save": ["lm_head"]},
        r"is \[96, 95\] in the adapter",
    ),
    "an unnamed whole": (
        {"base_model.model.lm_head.weight": np.zeros((96, 96), np.float32)},
        {},
        "is no factor of a linear layer",
    ),
    "a changed base": (tensors(), {"init_lora_weights": "pissa"}, "changes the base model"),
    "a new variant": (tensors(), {"use_surprise": True}, "use_surprise is set"),
    "a pattern": (tensors(), {"alpha_pattern": {"(a+)+$": 1}}, "not the name of a module"),
    "no magnitudes": (tensors(), {"use_dora": True}, "has no magnitude"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapter_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    given, config, text = REFUSED[name]
    with pytest.raises(AdapterRefused, match=text):
        open_adapter(write(tmp_path, given, **config), MODEL)


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("adapter_model.safetensors", b"", "cannot be read"),
        ("adapter_model.safetensors", b"\xff" * 100, "truncated or not safetensors"),
        (
            "adapter_model.safetensors",
            b'\x4f\0\0\0\0\0\0\0{"x.lora_A.weight":{"dtype":"F32","shape":[10000,262144],'
            b'"data_offsets":[0,10485760000]}}',
            "safetensors|truncated",
        ),
        ("adapter_config.json", b"{", "cannot be read"),
        ("adapter_config.json", b'{"peft_type":"LORA","lora_alpha":"x"}', "cannot be read"),
    ],
)
def test_broken_file_is_refused(tmp_path: Path, name: str, data: bytes, text: str) -> None:
    write(tmp_path, tensors())
    (tmp_path / name).write_bytes(data)
    with pytest.raises(AdapterRefused, match=text):
        open_adapter(tmp_path, MODEL)


def test_pickle_is_refused_unread(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterRefused, match="is a pickle, which can run code"):
        open_adapter(tmp_path, MODEL)


def write_gguf(path: Path, factors: Tensors, alpha: float = 6.0, kind: str = "lora") -> None:
    given = {
        f"{module}.weight.lora_{part}": numbers
        for module, pair in factors.items()
        for part, numbers in zip("ab", pair, strict=True)
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, numbers in given.items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_adapter_is_for_gguf_models(tmp_path: Path) -> None:
    path = tmp_path / "adapter.gguf"
    rng = np.random.default_rng(0)
    a, b = rng.random((RANK, 96), np.float32), rng.random((96, RANK), np.float32)
    write_gguf(path, {"blk.1.attn_q": (a, b)})
    model = dataclasses.replace(MODEL, is_gguf=True)
    found = open_adapter(path, model)["layers.1.q"]
    np.testing.assert_array_equal(found.b.to_float32(), b)
    assert found.scale == 1.5
    with pytest.raises(AdapterRefused, match="is for GGUF models"):
        open_adapter(path, MODEL)
    write_gguf(path, {"blk.1.attn_q": (a, b)}, kind="control_vector")
    with pytest.raises(AdapterRefused, match=r"adapter\.type is .control_vector."):
        open_adapter(path, model)


def test_gguf_stack_is_one_of_each_expert(tmp_path: Path) -> None:
    spec = MIXTURES["mixtral"]
    rng = np.random.default_rng(0)
    a, b = rng.random((4, RANK, 96), np.float32), rng.random((4, 96, RANK), np.float32)
    write_gguf(tmp_path / "a.gguf", {"blk.1.ffn_up_exps": (a, b)})
    model = dataclasses.replace(MODEL, spec=spec, weights=random_weights(spec), is_gguf=True)
    found = open_adapter(tmp_path / "a.gguf", model)
    assert len(found) == 4
    np.testing.assert_allclose(found["layers.1.experts.3.up"].delta, 1.5 * b[3] @ a[3], rtol=1e-5)


def test_folder_for_a_permuted_model_is_permuted(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, architecture="llama")
    model = dataclasses.replace(MODEL, spec=spec, is_gguf=True)
    given = tensors()
    found = open_adapter(write(tmp_path, given), model)
    b = given[f"base_model.model.{Q}.lora_B.weight"]
    heads = b.reshape(6, 2, 8, RANK)  # of 16 numbers: halves become pairs
    np.testing.assert_array_equal(
        found["layers.1.q"].b.to_float32(), heads.swapaxes(1, 2).reshape(96, RANK)
    )
