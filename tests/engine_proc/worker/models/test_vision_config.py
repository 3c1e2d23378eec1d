"""The decoder within a model that takes images, as configs and files say it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from random_decoders import SPEC, stored
from tiny_vision import FAMILIES, make_vision_folder, vision_config

from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.specs.decoder_spec import LayerSpec, MixtureSpec
from headrace.engine_proc.worker.models.vision_config import lower_vision
from headrace.engine_proc.worker.models.weight_names import transposed_stacks
from headrace.errors import ModelError

# As on the hub, without what concerns the tower alone.
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolVLM-256M": {
        "model_type": "idefics3",
        "image_token_id": 49190,
        "scale_factor": 4,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "idefics3"},
        "text_config": {
            "_flash_attn_2_enabled": True,
            "architectures": ["VLlama3ForCausalLM"],
            "head_dim": 64,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "model_type": "llama",
            "neftune_noise_alpha": 0.0,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pad_token_id": 2,
            "perceiver_config": {"model_type": "vllama3", "qk_layer_norms_perceiver": False},
            "pixel_shuffle_factor": 4,
            "qk_layer_norms": False,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_theta": 100000,
            "torch_dtype": "bfloat16",
            "use_resampler": False,
            "vocab_size": 49280,
        },
    },
    "PaliGemma": {
        "model_type": "paligemma",
        "image_token_index": 257152,
        "projection_dim": 2048,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "model_type": "gemma",
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_image_tokens": 256,
            "num_key_value_heads": 1,
            "torch_dtype": "float32",
            "vocab_size": 257216,
        },
    },
    "PaliGemma 2": {
        "model_type": "paligemma",
        "image_token_index": 257152,
        "projection_dim": 2304,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
        "text_config": {
            "cache_implementation": "hybrid",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "model_type": "gemma2",
            "num_hidden_layers": 26,
            "num_image_tokens": 256,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "vocab_size": 257216,
        },
    },
    "LLaVA 1.5": {
        "model_type": "llava",
        "image_token_index": 32000,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "clip_vision_model"},
        "text_config": {
            "_name_or_path": "lmsys/vicuna-7b-v1.5",
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
    },
    "Qwen2.5-VL 3B": {
        "model_type": "qwen2_5_vl",
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_token_id": 151654,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 128000,
        "max_window_layers": 70,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vision_config": {"depth": 32},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 151936,
    },
    "Qwen3-VL 4B": {
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": True,
        "vision_config": {
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [5, 11, 17],
            "out_hidden_size": 2560,
        },
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2560,
            "initializer_range": 0.02,
            "intermediate_size": 9728,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": 151936,
        },
    },
    "Qwen3-VL 30B-A3B": {
        "model_type": "qwen3_vl_moe",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_vl_moe", "out_hidden_size": 2048},
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "decoder_sparse_step": 1,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 6144,
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "use_cache": True,
            "vocab_size": 151936,
        },
    },
    "GLM-4.1V 9B": {
        "model_type": "glm4v",
        "image_token_id": 151343,
        "image_start_token_id": 151339,
        "image_end_token_id": 151340,
        "video_token_id": 151344,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "glm4v", "depth": 24},
        "text_config": {
            "attention_bias": True,
            "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338, 151348],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 13696,
            "max_position_embeddings": 65536,
            "model_type": "glm4v_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "pad_token_id": 151329,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"},
            "rope_theta": 10000.0,
            "use_cache": True,
            "vocab_size": 151552,
        },
    },
    "LLaVA-NeXT Mistral 7B": {
        "model_type": "llava_next",
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "image_token_index": 32000,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "use_image_newline_parameter": True,
        "vision_config": {"model_type": "clip_vision_model"},
        "text_config": {
            "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
            "architectures": ["MistralForCausalLM"],
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
            "vocab_size": 32064,
        },
    },
    "InternVL3 1B": {
        "model_type": "internvl",
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": 151667,
        "projector_hidden_act": "gelu",
        "vision_config": {"model_type": "internvl_vision"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "text_config": {
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "hidden_size": 896,
            "initializer_range": 0.02,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 70,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"factor": 2.0, "rope_type": "linear", "type": "linear"},
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 151674,
        },
    },
    "Mistral Small 3.1": {
        "model_type": "mistral3",
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral"},
        "vision_feature_layer": -1,
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "use_cache": True,
            "vocab_size": 131072,
        },
    },
    "Gemma 3 4B": {
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_mean_what_transformers_reads_in_them(name: str) -> None:
    published = PUBLISHED[name]
    config = transformers.AutoConfig.for_model(**published)
    assert lower_vision(published) == lower_vision(config.to_dict())
    spec, text = lower_vision(published), config.get_text_config()
    assert spec.vocab_size == text.vocab_size and spec.hidden_size == text.hidden_size
    assert spec.intermediate_size == text.intermediate_size
    assert (spec.num_heads, spec.num_kv_heads) == (
        text.num_attention_heads,
        text.num_key_value_heads,
    )
    assert len(spec.layers) == text.num_hidden_layers
    assert spec.max_position == text.max_position_embeddings
    assert spec.norm_eps == text.rms_norm_eps
    assert spec.tied_head == config.tie_word_embeddings


def test_mrope_sections_are_pairs_in_order() -> None:
    (rope,) = lower_vision(PUBLISHED["Qwen2.5-VL 3B"]).ropes
    assert rope.axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    (rope,) = lower_vision(PUBLISHED["Qwen3-VL 4B"]).ropes
    assert rope.axes == (0, 1, 2) * 20 + (0,) * 4


def test_deepstack_has_a_part_for_each_named_layer() -> None:
    published = PUBLISHED["Qwen3-VL 4B"]
    assert lower_vision(published).deepstack == 3
    assert lower_vision(published | {"vision_config": {}}).row_size == 4 * 2560
    assert lower_vision(PUBLISHED["Qwen2.5-VL 3B"]).deepstack == 0
    with pytest.raises(ModelError, match="'deepstack_visual_indexes' is 3, not a list"):
        lower_vision(published | {"vision_config": {"deepstack_visual_indexes": 3}})


# In transformers 5 a model has its parts within `model`; files mostly have older names.
NEWER = {
    "llava": {
        "language_model.lm_head.": "lm_head.",
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    "qwen2_5_vl": {"visual.": "model.visual.", "model.": "model.language_model."},
    "gemma3": {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
}


@pytest.mark.parametrize("family", NEWER)
def test_older_and_newer_names_of_weights_are_known(family: str, tmp_path: Path) -> None:
    make_vision_folder(tmp_path, family)
    older = open_model(tmp_path)
    file = tmp_path / "model.safetensors"
    newer = {rename(n, NEWER[family]): t for n, t in safetensors.torch.load_file(file).items()}
    assert any(name.startswith("model.language_model.layers.") for name in newer)
    newer["vision_tower.position_ids"] = torch.arange(3)  # of a dtype that no decoder has
    safetensors.torch.save_file(newer, file, {"format": "pt"})
    model = open_model(tmp_path)
    assert model.spec == older.spec and model.weights.keys() == older.weights.keys()
    for name, weight in model.weights.items():
        np.testing.assert_array_equal(weight.to_float32(), older.weights[name].to_float32())


def test_stacks_of_experts_may_lie_either_way(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "qwen3_vl_moe")
    stored = open_model(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    stacks = [name for name in weights if ".experts." in name]
    assert len(stacks) == 2 * len(stored.spec.layers)
    weights |= {name: weights[name].transpose(1, 2).contiguous() for name in stacks}
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    turned = open_model(tmp_path)
    for name, weight in turned.weights.items():
        np.testing.assert_array_equal(weight.to_float32(), stored.weights[name].to_float32())


@pytest.mark.parametrize("size", [24, 32, 64])  # of 32 gate and up are square, of 64 down
@pytest.mark.parametrize("are_turned", [False, True])
def test_a_square_stack_lies_as_the_other(are_turned: bool, size: int) -> None:
    mixture = MixtureSpec(num_experts=2, experts_per_token=1, intermediate_size=size)
    layers = (LayerSpec(), LayerSpec(mixture=mixture))
    spec = replace(SPEC, architecture="qwen3_vl_moe_text", hidden_size=64, layers=layers)
    shapes = {"gate_up_proj": (2, 2 * size, 64), "down_proj": (2, 64, size)}
    tensors = {
        f"layers.1.mlp.experts.{name}": stored(np.zeros(shape, np.float32).swapaxes(1, 2))
        if are_turned
        else stored(np.zeros(shape, np.float32))
        for name, shape in shapes.items()
    }
    assert transposed_stacks(spec, tensors) == (set(tensors) if are_turned else set())


def rename(name: str, beginnings: dict[str, str]) -> str:
    """Return a name with another beginning, if one of these fits."""
    for old, new in beginnings.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_that_is_stored_is_not_tied(is_tied: bool, tmp_path: Path) -> None:
    """As in published folders, whose configs say nothing of it."""
    make_vision_folder(tmp_path, "mistral3")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    config["text_config"].pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if is_tied:
        file = tmp_path / "model.safetensors"
        weights = safetensors.torch.load_file(file)
        del weights["language_model.lm_head.weight"]
        safetensors.torch.save_file(weights, file, {"format": "pt"})
    assert open_model(tmp_path).spec.tied_head == is_tied


def test_what_is_of_no_known_part_is_refused(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "llava")
    file = tmp_path / "model.safetensors"
    weights = safetensors.torch.load_file(file) | {"audio_tower.weight": torch.ones(2)}
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"'audio_tower.weight' is not part of"):
        open_model(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_decoder_s_own_fields_are_read_strictly(family: str) -> None:
    config = vision_config(family).to_dict()
    config["text_config"]["mystery"] = 1
    with pytest.raises(ModelError, match="'mystery'"):
        lower_vision(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"bits": 4}}, "'quantization_config'"),
        ({"text_config": {"model_type": "mamba"}}, "'mamba'"),
        ({"text_config": {"model_type": "qwen2_5_vl_text"}}, "mrope_section of 3, 8 in all"),
    ],
)
def test_what_cannot_be_executed_exactly_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    config = vision_config("llava").to_dict()
    config["text_config"] |= changes.pop("text_config", {})
    with pytest.raises(ModelError, match=named):
        lower_vision(config | changes)


def test_a_decoder_that_would_multiply_rows_of_images_is_refused() -> None:
    granite = transformers.AutoConfig.for_model("granite", embedding_multiplier=3.0).to_dict()
    config = vision_config("llava").to_dict() | {"text_config": granite}
    with pytest.raises(ModelError, match="multiplies rows of images"):
        lower_vision(config)
    config["text_config"] = granite | {"embedding_multiplier": 1.0}
    assert lower_vision(config).architecture == "granite"
