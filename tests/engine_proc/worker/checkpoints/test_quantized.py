"""Quantized checkpoints are read exactly; broken ones are refused by tensor and reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_folders import (
    HIDDEN,
    LAYER,
    Int4,
    awq,
    compressed,
    fp8_tensors,
    gptq,
    gptq_v2,
    int4_tensors,
    write_folder,
)
from random_decoders import batch, cpu
from torch import Tensor

from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.models.model import DecoderModel, NotLowered, open_model
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.parallel.shard import shard_weights, shards
from headrace.errors import ModelError

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}
EIGHT_BITS = COMPRESSED | {"config_groups": {"a": 3, "b": {"weights": {"num_bits": 8}}}}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FLOATS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
Q = f"{LAYER}self_attn.q_proj"
CHECKPOINTS: dict[str, Callable[[], tuple[dict[str, Any], tuple[Any, Any]]]] = {
    "awq": lambda: (AWQ, int4_tensors(awq, 32, sym=False)),
    "awq of whole rows": lambda: (AWQ | {"group_size": -1}, int4_tensors(awq, -1, sym=False)),
    "gptq": lambda: (GPTQ, int4_tensors(gptq, 32, sym=True)),
    "gptq asymmetric": lambda: (GPTQ | {"group_size": 64}, int4_tensors(gptq, 64, sym=False)),
    "gptq in order of activations": lambda: (GPTQ, int4_tensors(gptq, 32, sym=False, act=True)),
    "gptq v2": lambda: (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        int4_tensors(gptq_v2, 32, sym=False),
    ),
    "pack-quantized": lambda: (COMPRESSED, int4_tensors(compressed, 32, sym=True)),
    "pack-quantized asymmetric": lambda: (COMPRESSED, int4_tensors(compressed, 64, sym=False)),
    "fp8": lambda: (FP8, fp8_tensors("tensor")),
    "fp8 in blocks": lambda: (FP8 | {"weight_block_size": [128, 128]}, fp8_tensors("block")),
    "float-quantized": lambda: (FLOATS, fp8_tensors("channel")),
}


def opened(name: str, folder: Path) -> tuple[DecoderModel, DecoderModel]:
    """Open a quantized checkpoint, and what it decodes to."""
    settings, (quantized, decoded) = CHECKPOINTS[name]()
    ours = open_model(write_folder(folder / "quantized", quantized, settings))
    return ours, open_model(write_folder(folder / "decoded", decoded))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_and_logits_are_those_of_what_it_decodes_to(name: str, tmp_path: Path) -> None:
    ours, theirs = opened(name, tmp_path)
    for weight in weight_shapes(ours.spec):
        numbers = ours.weights[weight].to_float32()
        np.testing.assert_array_equal(numbers, theirs.weights[weight].to_float32(), weight)
        np.testing.assert_array_equal(ours.weights[weight].stored().to_float32(), numbers)
    step = batch([(0, 0, 20), (1, 0, 3)])
    step.token_ids[:] %= 96
    logits = cpu(ours.spec, ours.weights).forward(step)
    expected = cpu(theirs.spec, theirs.weights).forward(step)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq in order of activations", "fp8 in blocks"])
def test_shares_are_parts_of_the_whole(name: str, tmp_path: Path) -> None:
    model, _ = opened(name, tmp_path)
    rows = ("q", "gate")
    num_ranks = 1 if name == "fp8 in blocks" else 2
    own = [
        shard_weights(model.spec, model.weights, s)
        for s in shards(model.spec, model.weights, num_ranks)
    ]
    for local in (*rows, "o", "down"):
        whole = model.weights[f"layers.0.{local}"].to_float32()
        parts = [share[f"layers.0.{local}"].to_float32() for share in own]
        np.testing.assert_array_equal(np.concatenate(parts, 0 if local in rows else 1), whole)
    uneven = model.weights["layers.0.gate"].rows(5, 23).rows(2, 11)
    np.testing.assert_array_equal(
        uneven.to_float32(), model.weights["layers.0.gate"].to_float32()[7:16]
    )


def test_symmetric_4_bits_stay_so_on_a_cpu(tmp_path: Path) -> None:
    for name, format in (("gptq", Format.Q4_0), ("awq", Format.F32)):
        (tmp_path / name).mkdir()
        model, _ = opened(name, tmp_path / name)
        assert model.weights["layers.0.down"].format == format
        assert model.weights["layers.0.down"].stored().format == format


def test_biases_of_zeros_are_passed_over(tmp_path: Path) -> None:
    quantized, _ = int4_tensors(gptq, 32, sym=True)
    quantized[f"{LAYER}self_attn.o_proj.bias"] = torch.zeros(HIDDEN)
    open_model(write_folder(tmp_path / "zeros", quantized, GPTQ))
    quantized[f"{LAYER}self_attn.o_proj.bias"][3] = 1
    with pytest.raises(ModelError, match=r"o_proj\.bias' is not part of"):
        open_model(write_folder(tmp_path / "ones", quantized, GPTQ))


def test_scales_of_keys_and_values_are_read(tmp_path: Path) -> None:
    quantized, _ = fp8_tensors("tensor")
    assert open_model(write_folder(tmp_path / "none", quantized, FP8)).kv_scales == ()
    quantized[f"{LAYER}self_attn.k_scale"] = torch.tensor(0.25)
    quantized[f"{LAYER}self_attn.v_scale"] = torch.tensor([-1.0])  # not measured
    model = open_model(write_folder(tmp_path / "told", quantized, FP8))
    assert model.kv_scales == ((0.25, 1.0),)


def lacking(part: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(f"{Q}.{part}")


def other(part: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{Q}.{part}": tensor})


@pytest.mark.parametrize(
    ("settings", "packed", "break_it", "message"),
    [
        (AWQ, awq, lacking("scales"), rf"'{Q}\.scales' is missing"),
        (AWQ, awq, lacking("qzeros"), rf"'{Q}\.qzeros' is missing"),
        (AWQ | {"group_size": 48}, awq, None, r"'.*qweight' has 128 columns, .* groups of 48"),
        (AWQ | {"group_size": 16}, awq, None, r"'.*scales' is F16 \[4, 64\], not \[8, 64\]"),
        (AWQ | {"version": "gemv"}, awq, None, "awq of version 'gemv' is not supported"),
        (AWQ | {"bits": 8}, awq, None, "awq of 8 bits is not supported"),
        (AWQ | {"bits": "4"}, awq, None, "'bits': '4', not int"),
        (GPTQ | {"checkpoint_format": "marlin"}, gptq, None, "checkpoint_format of 'marlin'"),
        (GPTQ, gptq, other("g_idx", torch.full((64,), 2, dtype=torch.int32)), "'.*g_idx' names a"),
        (GPTQ, gptq, other("g_idx", torch.zeros(3, dtype=torch.int32)), r"'.*g_idx' is I32 \[3\]"),
        (GPTQ, gptq, other("qzeros", torch.zeros(2, 2, dtype=torch.int32)), r"'.*qzeros' is I32"),
        (GPTQ, gptq, other("qweight", torch.zeros(8, 64)), r"'.*qweight' is F32 \[8, 64\], not"),
        (GPTQ, gptq, other("scales", torch.zeros(2, 64, dtype=torch.int32)), "'.*scales' is I32"),
        (GPTQ, gptq, other("bias", torch.zeros(64, dtype=torch.int32)), "'.*bias' is I32"),
        (EIGHT_BITS, compressed, None, "compressed-tensors of 8 bits"),
        (COMPRESSED, compressed, other("weight_zero_point", torch.zeros(8, 2)), "zero_point' is F"),
        (COMPRESSED, compressed, lacking("weight_scale"), r"weight_scale' is missing"),
        (COMPRESSED, compressed, other("weight_scale", torch.zeros(64, 3)), "weight_scale' is F32"),
        (FP8, awq, None, r"qweight' is not part of a checkpoint in fp8"),
    ],
)
def test_broken_4_bits_are_refused_by_tensor(
    settings: dict[str, Any],
    packed: Callable[[Int4], dict[str, Tensor]],
    break_it: Callable[[dict[str, Tensor]], None] | None,
    message: str,
    tmp_path: Path,
) -> None:
    quantized, _ = int4_tensors(packed, 32, sym=False)
    if break_it is not None:
        break_it(quantized)
    folder = write_folder(tmp_path / "broken", quantized, settings)
    with pytest.raises(ModelError, match=message) as refusal:
        open_model(folder)
    assert str(refusal.value).startswith(f"{folder}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lacking("weight_scale"), rf"'{Q}\.weight_scale' is missing"),
        (other("weight_scale", torch.zeros(3)), r"weight_scale' is F32 \[3\], not a scale for all"),
        (other("weight", torch.zeros(64, 64, dtype=torch.float8_e5m2)), "is stored as F8_E5M2"),
        (
            other("weight", torch.zeros(64, dtype=torch.float8_e4m3fn)),
            r"weight' is .*, not a matrix",
        ),
    ],
)
def test_broken_fp8_is_refused_by_tensor(
    break_it: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    quantized, _ = fp8_tensors("channel")
    break_it(quantized)
    with pytest.raises(ModelError, match=message):
        open_model(write_folder(tmp_path / "broken", quantized, FLOATS))


def test_blocks_are_of_two_sizes(tmp_path: Path) -> None:
    quantized, _ = fp8_tensors("block")
    quantized[f"{Q}.weight_scale_inv"] = torch.ones(2, 2)
    for block in ([128], [64, "32"], [0, 32]):
        folder = write_folder(tmp_path / str(block), quantized, FP8 | {"weight_block_size": block})
        with pytest.raises(ModelError, match=r"'weight_block_size'.* not two sizes"):
            open_model(folder)


def test_an_unknown_method_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "unknown", {}, {"quant_method": "bitsandbytes"})
    with pytest.raises(NotLowered, match="quant_method 'bitsandbytes'; supported are awq, gptq"):
        open_model(folder)
