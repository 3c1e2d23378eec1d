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
from headrace.model.gguf_metadata import vocabulary_of
from headrace.model.mmproj import read_mmproj
from headrace.model.mmproj_weights import tower_weights
from headrace.tokenizer_proc.images.image_tokens import spelling_of

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
    tokens = list(vocabulary_of(file.metadata) or ())
    file.metadata["tokenizer.ggml.tokens"] = tokens
    tokens[tokens.index("<image>")] = "<picture>"
    with pytest.raises(ModelError, match=r"smolvlm\.gguf lacks the token <image> of its images"):
        read_mmproj(twins.mmproj, file)


def test_rows_of_gemma_need_no_token_of_their_own(twins: Twins, tmp_path: Path) -> None:
    gemma = make_twins(tmp_path, "gemma3")
    file = read_metadata(gemma.decoder)
    tokens = list(vocabulary_of(file.metadata) or ())
    file.metadata["tokenizer.ggml.tokens"] = tokens
    tokens[tokens.index("<image_soft_token>")] = "<unused0>"  # as in published files
    config = read_mmproj(gemma.mmproj, file).folder.config
    assert config["image_token_index"] == tokens.index("<unused0>")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return make_twins(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return make_twins(tmp_path_factory.mktemp("llava"), "llava")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"clip.vision.n_wa_pattern": None}, "clip.vision.n_wa_pattern is missing"),
        ({"clip.vision.attention.layer_norm_epsilon": 1e-5}, "layer_norm_epsilon is 1e-05, not"),
        ({"clip.projector_type": "qwen2vl_merger"}, "projector 'qwen2vl_merger' is not supported"),
        ({"clip.vision.spatial_merge_size": 3}, "tensor 'mm.0.weight' has shape [128, 128], but"),
    ],
)
def test_wrong_metadata_of_qwen_is_named(
    keys: dict[str, Any], says: str, qwen: Twins, tmp_path: Path
) -> None:
    path = write_mmproj(tmp_path / "mmproj.gguf", qwen.folder, "qwen2_5_vl", keys=keys)
    assert says in refusal(qwen, path)


def test_settings_that_no_qwen_file_has_are_the_published_ones(qwen: Twins, tmp_path: Path) -> None:
    names = ("window_size", "image_min_pixels", "image_max_pixels")
    keys = {f"clip.vision.{name}": None for name in names}
    path = write_mmproj(tmp_path / "mmproj.gguf", qwen.folder, "qwen2_5_vl", keys=keys)
    folder = read_mmproj(path, read_metadata(qwen.decoder)).folder
    assert folder.config["vision_config"]["window_size"] == 112
    assert folder.image_settings["size"] == {"shortest_edge": 3136, "longest_edge": 12845056}


@pytest.mark.parametrize(
    ("keys", "tensors", "says"),
    [
        ({"clip.vision.feature_layer": [1, 0]}, {}, "feature_layer is [1, 0], not the last of 1"),
        ({"clip.vision.image_grid_pinpoints": [336]}, {}, "field `clip.vision.image_grid_pinpoin"),
        ({}, {"mm.2.weight": None}, "tensor 'mm.2.weight' is missing"),
        ({}, {"mm.2.weight": np.zeros((8, 64), np.float32)}, "its rows have 8 numbers, and those"),
        ({}, {"model.image_newline": np.zeros(8, np.float32)}, "'model.image_newline' is not part"),
    ],
)
def test_wrong_files_of_llava_are_named(
    keys: dict[str, Any], tensors: dict[str, Any], says: str, llava: Twins, tmp_path: Path
) -> None:
    path = tmp_path / "mmproj.gguf"
    write_mmproj(path, llava.folder, "llava", keys=keys, tensors=tensors)
    assert says in refusal(llava, path)


def test_a_decoder_of_llava_needs_no_image_token(llava: Twins) -> None:
    file = read_metadata(llava.decoder)
    tokens = list(vocabulary_of(file.metadata) or ())
    file.metadata["tokenizer.ggml.tokens"] = tokens
    tokens[tokens.index("<image>")] = "<unk>"
    folder = read_mmproj(llava.mmproj, file).folder
    spelling = spelling_of(folder.config, folder.settings, tokens.__getitem__)
    assert (spelling.placeholder, spelling.token) == ("<image>", "<unk>")
    assert spelling.spell({"pixel_values": np.zeros((1, 3, 28, 28))}) == "<unk>" * 16


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
