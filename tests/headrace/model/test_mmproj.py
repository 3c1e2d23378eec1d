"""Projector files that contradict themselves, or their decoder, are refused in one line."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from mmproj_twins import Twins, make_twins, mmproj_keys, write, write_mmproj

from headrace.config.model_card import read_gguf
from headrace.errors import ModelError
from headrace.model.gguf import read_metadata
from headrace.model.mmproj import read_mmproj
from headrace.model.mmproj_weights import tower_weights

FC = "mm.model.fc.weight"


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return make_twins(tmp_path_factory.mktemp("twins"), "smolvlm")


def refusal(twins: Twins, path: Path) -> str:
    with pytest.raises(ModelError) as refused:
        read_gguf(twins.decoder, path)
    text = str(refused.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"clip.projector_type": "pixtral"}, "projector 'pixtral' is not supported; supported are"),
        ({"clip.projector_type": None}, "projector '' is not supported"),
        ({"clip.projector_type": "gemma3"}, "its projector is for decoders of architecture gemma3"),
        ({"clip.vision.projection_dim": 128}, "its rows have 128 numbers, and those of"),
        ({"clip.vision.image_size": None}, "missing required field `clip.vision.image_size`"),
        ({"clip.vision.patch_size": 0}, "Expected `int` >= 1 - at `$.clip.vision.patch_size`"),
        ({"clip.vision.patch_size": 33}, "its images of 32 pixels have 0 patches each way"),
        ({"clip.vision.block_count": 1 << 40}, "Expected `int` <= 1024"),
        ({"clip.vision.image_mean": [0.5]}, "Expected `array` of length >= 3"),
        ({"clip.vision.image_std": [1.0, 0.0, 1.0]}, "clip.vision.image_std is [1.0, 0.0, 1.0]"),
        ({"clip.vision.wa_layer_indexes": [1]}, "unknown field `clip.vision.wa_layer_indexes`"),
        ({"clip.vision.projector.scale_factor": 3}, "have 4 patches each way, not a multiple of 3"),
        ({"clip.vision.attention.head_count": 5}, "is 32, not a multiple of"),
        ({"clip.vision.block_count": 3}, "tensor 'v.blk.2.ln1.weight' is missing"),
        ({"clip.vision.block_count": 1}, "tensor 'v.blk.1.attn_k.bias' is not part of a tower"),
    ],
)
def test_wrong_metadata_is_named(
    keys: dict[str, Any], says: str, twins: Twins, tmp_path: Path
) -> None:
    path = write_mmproj(tmp_path / "mmproj.gguf", twins.folder, "smolvlm", keys=keys)
    text = refusal(twins, path)
    assert says in text
    assert text.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({FC: None}, f"tensor {FC!r} is missing"),
        ({FC: np.zeros((64, 64), np.float32)}, f"tensor {FC!r} has shape [64, 64], but a tower of"),
        ({"mm.0.weight": np.zeros(4, np.float32)}, "tensor 'mm.0.weight' is not part of a tower"),
    ],
)
def test_wrong_tensors_are_named(
    tensors: dict[str, Any], says: str, twins: Twins, tmp_path: Path
) -> None:
    path = write_mmproj(tmp_path / "mmproj.gguf", twins.folder, "smolvlm", tensors=tensors)
    assert says in refusal(twins, path)


def test_a_file_that_is_no_projector_is_refused(twins: Twins, tmp_path: Path) -> None:
    assert "its architecture is 'llama', not 'clip'" in refusal(twins, twins.decoder)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(twins.mmproj.read_bytes()[:-100])
    assert f"{cut}: truncated: tensor" in refusal(twins, cut)


def test_a_decoder_without_the_image_token_is_refused(twins: Twins, tmp_path: Path) -> None:
    file = read_metadata(twins.decoder)
    tokens: Any = file.metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("<image>")] = "<picture>"
    with pytest.raises(ModelError, match=r"smolvlm\.gguf lacks the token <image> of its images"):
        read_mmproj(twins.mmproj, file)


def test_rows_of_gemma_need_no_token_of_their_own(twins: Twins, tmp_path: Path) -> None:
    gemma = make_twins(tmp_path, "gemma3")
    file = read_metadata(gemma.decoder)
    tokens: Any = file.metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("<image_soft_token>")] = "<unused0>"  # as in published files
    config = read_mmproj(gemma.mmproj, file).folder.config
    assert config["image_token_index"] == tokens.index("<unused0>")


def test_names_of_older_converters_are_known(twins: Twins, tmp_path: Path) -> None:
    swaps = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    stored = gguf.GGUFReader(twins.mmproj).tensors
    tensors = {
        ".".join(swaps.get(part, part) for part in tensor.name.split(".")): tensor.data.copy()
        for tensor in stored
    }
    path = write(tmp_path / "old.gguf", "clip", mmproj_keys(twins.folder, "smolvlm"), tensors)
    weights = tower_weights(read_mmproj(path, read_metadata(twins.decoder)))
    fc1 = weights["vision_model.encoder.layers.0.mlp.fc1.weight"]
    assert fc1.tensors == ("v.blk.0.ffn_down.weight",)
    assert read_gguf(twins.decoder, path).takes_images
