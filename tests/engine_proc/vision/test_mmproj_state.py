"""The tower of a projector file gives the rows that the folder's gives."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from mmproj_twins import make_twins, write_mmproj
from tiny_vision import picture, prepare

from headrace.engine_proc.vision.tower import Tower, load, load_mmproj

FAMILIES = ("smolvlm", "idefics3", "gemma3", "qwen2_5_vl", "llava")


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_the_folder_s_tower(family: str, tmp_path: Path) -> None:
    twins = make_twins(tmp_path, family)
    towers = Tower(load(twins.folder)), Tower(load_mmproj(twins.mmproj, twins.decoder))
    for seed, size in enumerate([(80, 60), (40, 90)]):
        image = prepare(twins.folder, picture(seed, *size))
        (expected,), (rows,) = (tower.encode([image]) for tower in towers)
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Quantization.F16, torch.float16),
        (Quantization.BF16, torch.bfloat16),
        (Quantization.Q8_0, torch.float16),
    ],
)
def test_any_type_of_gguf_is_decoded(
    kind: Quantization, dtype: torch.dtype, tmp_path: Path
) -> None:
    twins = make_twins(tmp_path, "smolvlm")
    path = write_mmproj(tmp_path / "mmproj.gguf", twins.folder, "smolvlm", kind=kind)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["mm.model.fc.weight"]
    assert stored.tensor_type == kind
    name = "connector.modality_projection.proj.weight"
    weight = load_mmproj(path, twins.decoder).state_dict()[name]
    np.testing.assert_array_equal(weight, gguf.dequantize(stored.data, kind))
    assert load_mmproj(path, twins.decoder, "auto").dtype == dtype
