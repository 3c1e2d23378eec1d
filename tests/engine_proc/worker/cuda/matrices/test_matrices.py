"""Weights of every format give a decoder the logits of what they decode to."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_tests import first_of
from quantized_folders import awq, compressed, fp8_tensors, gptq, int4_tensors, write_folder
from random_decoders import NUM_PAGES, SPEC, batch, cpu, random_weights, stored
from recorded_graphs import RecordedGraphs, device_tensors

from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Buckets, Sizes
from headrace.engine_proc.worker.cuda.graphs import CudaGraphs
from headrace.engine_proc.worker.cuda.matrices.dense import DenseMatrix
from headrace.engine_proc.worker.cuda.matrices.fp8 import Fp8Matrix
from headrace.engine_proc.worker.cuda.matrices.int4 import Int4Matrix
from headrace.engine_proc.worker.cuda.matrices.matrices import load_weights
from headrace.engine_proc.worker.cuda.matrices.upload import to_device
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.dummy_weights import dummy_weights
from headrace.engine_proc.worker.models.model import DecoderModel, open_model
from headrace.engine_proc.worker.parallel.shard import shard_spec, shard_weights, shards

GROUPS = {"bits": 4, "group_size": 32}
AWQ, GPTQ = {"quant_method": "awq"} | GROUPS, {"quant_method": "gptq"} | GROUPS
COMPRESSED = {"quant_method": "compressed-tensors"}
CHECKPOINTS: dict[str, tuple[Any, Callable[[], Any], type]] = {
    "awq": (AWQ, lambda: int4_tensors(awq, 32, sym=False), Int4Matrix),
    "gptq in order of activations": (
        GPTQ,
        lambda: int4_tensors(gptq, 32, sym=False, act=True),
        DenseMatrix,  # q, k and v have orders of their own here
    ),
    "pack-quantized": (
        COMPRESSED,
        lambda: int4_tensors(compressed, 64, sym=True),
        Int4Matrix,
    ),
    "fp8": ({"quant_method": "fp8"}, lambda: fp8_tensors("tensor"), Fp8Matrix),
    "fp8 in blocks": ({"quant_method": "fp8"}, lambda: fp8_tensors("block"), Fp8Matrix),
    "float-quantized": (COMPRESSED, lambda: fp8_tensors("channel"), Fp8Matrix),
}


def step() -> Batch:
    some = batch([(0, 0, 5), (1, 0, 2)])
    some.token_ids[:] %= 96
    return some


def executor(model: DecoderModel, device: torch.device, **options: Any) -> CudaExecutor:
    return CudaExecutor(
        model.spec,
        model.weights,
        num_pages=NUM_PAGES,
        page_tokens=16,
        device=device,
        **({"dtype": torch.float32} | options),
    )


def assert_near(logits: Floats, expected: Floats, share: float = 1e-4) -> None:
    """Compare logits, as shares of how much those of a row differ from each other."""
    errors = np.abs(logits - expected).max()
    assert errors < share * expected.std(axis=1).min(), errors


def assert_alike(logits: Floats, expected: Floats) -> None:
    """Compare logits where factors of products were rounded to 8-bit floats."""
    for ours, theirs in zip(logits, expected, strict=True):
        assert np.corrcoef(ours, theirs)[0, 1] > 0.95


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_what_a_checkpoint_decodes_to(
    name: str, tmp_path: Path, device: torch.device
) -> None:
    settings, make, kind = CHECKPOINTS[name]
    quantized, decoded = make()
    ours = executor(open_model(write_folder(tmp_path / "quantized", quantized, settings)), device)
    theirs = open_model(write_folder(tmp_path / "decoded", decoded))
    expected = cpu(theirs.spec, theirs.weights).forward(step())
    (assert_alike if kind is Fp8Matrix else assert_near)(ours.forward(step()), expected)
    assert type(ours.matrices["layers.0.qkv"]) is kind
    assert type(ours.matrices["layers.0.down"]) in (kind, Int4Matrix)
    assert type(ours.matrices["head"]) is DenseMatrix


def test_an_order_that_parts_share_is_kept(tmp_path: Path, device: torch.device) -> None:
    quantized, decoded = int4_tensors(gptq, 32, sym=False, act=True)
    model = open_model(write_folder(tmp_path / "quantized", quantized, GPTQ))
    matrix = Int4Matrix.of([model.weights["layers.0.q"]], None, device)
    assert matrix is not None and matrix.order is not None
    x = torch.randn(3, 64, device=device)
    weight = decoded["model.layers.0.self_attn.q_proj.weight"].to(device)
    torch.testing.assert_close(matrix.apply(x), x @ weight.T)


def test_fp8_rounds_the_matrices_of_layers_alone(device: torch.device) -> None:
    model = DecoderModel(SPEC, random_weights(SPEC), ())
    ours = executor(model, device, quantization="fp8")
    assert {type(matrix) for matrix in ours.matrices.values()} == {Fp8Matrix, DenseMatrix}
    assert type(ours.matrices["head"]) is DenseMatrix
    exact = cpu(SPEC).forward(step())
    logits = ours.forward(step())
    assert_alike(logits, exact)
    assert np.abs(logits - exact).max() > 1e-3


def test_fp8_kv_is_near_and_nearer_with_scales(
    device: torch.device,
) -> None:
    weights = dict(random_weights(SPEC))
    for name in ("k", "v"):  # beyond what fp8 has between its steps
        weights[f"layers.0.{name}"] = stored(weights[f"layers.0.{name}"].to_float32() / 4096)
    model = DecoderModel(SPEC, weights, ())
    exact = cpu(SPEC, weights).forward(step())
    plain = executor(model, device, kv_dtype=torch.float8_e4m3fn)
    scales = [(2.0**-12, 2.0**-12), (1.0, 1.0)]
    scaled = executor(model, device, kv_dtype=torch.float8_e4m3fn, kv_scales=scales)
    assert plain.page_bytes == executor(model, device).page_bytes // 4
    errors = [np.abs(e.forward(step()) - exact).max() for e in (plain, scaled)]
    assert_alike(scaled.forward(step()), exact)
    assert errors[1] < errors[0]


@pytest.mark.parametrize("format", first_of(1, [Format.Q8_0, Format.BF16]))
def test_blocks_of_gguf_are_decoded(format: Format, device: torch.device) -> None:
    weights = random_weights(SPEC, format)
    ours = executor(DecoderModel(SPEC, weights, ()), device)
    assert_near(ours.forward(step()), cpu(SPEC, weights).forward(step()), 1e-3)


@pytest.mark.parametrize("name", first_of(1, ["fp8", "awq"]))
def test_graphs_have_every_format(name: str, tmp_path: Path, device: torch.device) -> None:
    settings, make, _ = CHECKPOINTS[name]
    model = open_model(write_folder(tmp_path / "quantized", make()[0], settings))
    options = {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn}
    options |= {"largest": Sizes(64, 4, 10), "max_model_len": 304}
    eager, captured = (executor(model, device, **options) for _ in range(2))
    stand_in = partial(RecordedGraphs, list(device_tensors(captured)))
    captured.capture(Buckets([Sizes(8, 4, 8)]), stand_in if device.type == "cpu" else CudaGraphs)
    # The library's product of padded rows may have other bits.
    for _ in range(2):
        np.testing.assert_allclose(
            captured.forward(step()), eager.forward(step()), atol=0.1 if name == "fp8" else 0
        )


def test_shares_are_cut_from_every_format(tmp_path: Path, device: torch.device) -> None:
    for name in ("awq", "float-quantized"):
        settings, make, kind = CHECKPOINTS[name]
        model = open_model(write_folder(tmp_path / name, make()[0], settings))
        x = torch.randn(4, 128, device=device)
        whole = load_all(model, model.spec, model.weights, device)["layers.0.down"]
        assert type(whole) is kind
        sums = torch.zeros(4, 64, device=device)
        for shard in shards(model.spec, model.weights, 2):
            spec = shard_spec(model.spec, shard)
            own = load_all(model, spec, shard_weights(model.spec, model.weights, shard), device)
            assert type(own["layers.0.down"]) is kind
            sums += own["layers.0.down"].apply(x[:, shard.inner.start : shard.inner.stop])
        torch.testing.assert_close(sums, whole.apply(x), atol=0.1, rtol=0.05)


def load_all(model: DecoderModel, spec: Any, weights: Any, device: torch.device) -> Any:
    return load_weights(spec, weights, device=device, dtype=torch.float32).matrices


def test_progress_is_reported_and_pieces_are_as_the_whole(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine_proc.worker.cuda.matrices.upload.PIECE_NUMBERS", 500)
    weights, told = dummy_weights(SPEC), list[tuple[int, int]]()
    loaded = load_weights(
        SPEC,
        weights,
        device=device,
        dtype=torch.float32,
        progress=lambda done, total: told.append((done, total)),
    )
    total = told[-1][1]
    assert told == [(done, total) for done in range(total + 1)]
    parts = [weights[f"layers.1.{name}"] for name in ("gate", "up")]
    whole = np.concatenate([part.to_float32() for part in parts])
    gate_up = loaded.matrices["layers.1.gate_up"]
    assert isinstance(gate_up, DenseMatrix)
    np.testing.assert_array_equal(gate_up.weight.cpu().numpy(), whole)
    assert to_device(parts[:1], device, torch.bfloat16).dtype == torch.bfloat16
