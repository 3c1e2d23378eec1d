"""Small random models that take images, on disk: the shapes of published ones, shrunk."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from vision_templates import TEMPLATES

from headrace.tokenizer_proc.images.processor import stored_processor

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 256,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
GRID_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"fullatt_block_indexes": [1], "window_size": 56},
    "qwen3_vl": {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_moe": {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5": {"num_position_embeddings": 36},
    "glm4v": {"image_size": 56},
    "glm4v_moe": {"image_size": 56},
}
GRID_TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"head_dim": 16},
    "qwen3_vl_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "glm4v_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    },
    "qwen3_5": {
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
    },
}
MROPE_SECTIONS: dict[str, list[int]] = {  # of others [3, 3, 2]
    "qwen2_5_vl": [2, 3, 3],
    "glm4v": [1, 1, 2],
    "glm4v_moe": [1, 1, 2],
}
PARTIAL_ROPE = ("qwen3_5", "glm4v", "glm4v_moe")  # families of which half of each head rotates
BEGINNING = ("<s>", "</s>")  # tokens 256 and 257, after those of single bytes
SPECIAL = {  # by family, after these; the first is the image token
    "smolvlm": (
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        "<end_of_utterance>",
        *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
    ),
    "llava": ("<image>",),
    "qwen2_5_vl": (
        "<|image_pad|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|video_pad|>",
        "<|im_start|>",
        "<|im_end|>",
    ),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
}
SPECIAL["gemma4"] = SPECIAL["gemma4_whole"] = (
    "<|image|>",
    "<|image>",
    "<image|>",
    "<|video|>",
    "<|audio|>",
    "<|audio>",
    "<audio|>",
    "<|turn>",
    "<turn|>",
)
SPECIAL["internvl"] = ("<IMG_CONTEXT>", "<img>", "</img>", "<|im_start|>", "<|im_end|>")
SPECIAL["mistral3"] = SPECIAL["pixtral"] = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
SPECIAL["lfm2_vl"] = (
    "<image>",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
)
SPECIAL["idefics3"] = SPECIAL["smolvlm"]
SPECIAL["llava_next"] = SPECIAL["paligemma"] = SPECIAL["paligemma2"] = SPECIAL["llava"]
SPECIAL["qwen3_vl"] = SPECIAL["qwen3_vl_moe"] = SPECIAL["qwen3_5"] = SPECIAL["qwen2_5_vl"]
SPECIAL["glm4v"] = SPECIAL["glm4v_moe"] = (
    "<|image|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|video|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
IMAGE_TOKEN = 258
BEGUN = (
    "llava",
    "llava_next",
    "gemma3",
    "paligemma",
)  # families whose tokenizers begin each text with the first of these
FAMILIES = (
    "smolvlm",
    "idefics3",
    "llava",
    "llava_next",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "glm4v",
    "glm4v_moe",
    "internvl",
    "mistral3",
    "pixtral",
    "gemma3",
    "gemma4",
    "lfm2_vl",
    "gemma4_whole",  # whose images' tokens see each other
    "paligemma",  # of which all tokens of a prompt do
    "paligemma2",
)
SIZED = (
    "mistral3",
    "pixtral",
    "lfm2_vl",
)  # families whose images only go together if they are of one size
GRIDS = tuple(GRID_TOWERS)  # families whose images have rows and columns
ANYRES_GRIDS = [[28, 56], [56, 28], [56, 56]]
OWN_PROCESSOR = "Lfm2VlImageProcessor"  # transformers has it for torchvision alone
SPLITTING = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
IMAGE_PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "smolvlm": ("SmolVLMImageProcessorPil", SPLITTING),
    "idefics3": ("Idefics3ImageProcessorPil", SPLITTING),
    "llava": (
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
    ),
    "llava_next": (
        "LlavaNextImageProcessorPil",
        {
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            "image_grid_pinpoints": ANYRES_GRIDS,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}},
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5"),
        (
            "Qwen2VLImageProcessorPil",
            {"size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}, "patch_size": 16},
        ),
    ),
    **dict.fromkeys(  # which count an image as two frames
        ("glm4v", "glm4v_moe"),
        (
            "Glm4vImageProcessorPil",
            {"size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 112 * 112}},
        ),
    ),
    "internvl": (
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 28, "width": 28}, "max_patches": 4, "crop_to_patches": True},
    ),
    "mistral3": ("PixtralImageProcessorPil", {"size": {"longest_edge": 56}, "patch_size": 14}),
    "pixtral": ("PixtralImageProcessorPil", {"size": {"longest_edge": 28}, "patch_size": 7}),
    "lfm2_vl": (
        OWN_PROCESSOR,
        {
            "encoder_patch_size": 4,
            "tile_size": 16,
            "min_image_tokens": 4,
            "max_image_tokens": 9,
            "max_tiles": 4,
        },
    ),
    "gemma3": ("Gemma3ImageProcessorPil", {"size": {"height": 56, "width": 56}}),
    **dict.fromkeys(
        ("paligemma", "paligemma2"),
        (
            "SiglipImageProcessorPil",
            {"size": {"height": 56, "width": 56}, "image_seq_length": 16},
        ),
    ),
    **dict.fromkeys(
        ("gemma4", "gemma4_whole"),
        ("Gemma4ImageProcessorPil", {"patch_size": 4, "max_soft_tokens": 70}),
    ),
}
PROCESSORS: dict[str, dict[str, Any]] = {  # processor_config.json
    "smolvlm": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    "idefics3": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    "llava": {
        "processor_class": "LlavaProcessor",
        "patch_size": 7,
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
    },
    "llava_next": {
        "processor_class": "LlavaNextProcessor",
        "patch_size": 7,
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
    },
    "qwen2_5_vl": {"processor_class": "Qwen2_5_VLProcessor"},
    "qwen3_vl": {"processor_class": "Qwen3VLProcessor"},
    "qwen3_vl_moe": {"processor_class": "Qwen3VLProcessor"},
    "qwen3_5": {"processor_class": "Qwen3VLProcessor"},
    "glm4v": {"processor_class": "Glm4vProcessor"},
    "glm4v_moe": {"processor_class": "Glm4vProcessor"},
    "internvl": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    "mistral3": {"processor_class": "PixtralProcessor", "patch_size": 7, "spatial_merge_size": 2},
    "pixtral": {"processor_class": "PixtralProcessor", "patch_size": 7},
    "lfm2_vl": {"processor_class": "Lfm2VlProcessor"},
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    "gemma4": {"processor_class": "Gemma4Processor"},
    "gemma4_whole": {"processor_class": "Gemma4Processor"},
    "paligemma": {"processor_class": "PaliGemmaProcessor"},
    "paligemma2": {"processor_class": "PaliGemmaProcessor"},
}


Parts = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]  # tower; beside it; in the text


def tile_parts(family: str) -> Parts:
    tower = {"image_size": 32, "patch_size": 8, "model_type": f"{family}_vision"}
    parts = {"image_token_id": IMAGE_TOKEN, "scale_factor": 2, "pad_token_id": 256}
    return tower, parts, {"model_type": "llama"}


def llava_parts(family: str) -> Parts:
    tower = {"image_size": 28, "patch_size": 7, "projection_dim": 16}
    tower |= {"model_type": "clip_vision_model", "vocab_size": 16}
    parts = {"image_token_index": IMAGE_TOKEN, "image_seq_length": 16}
    if family == "llava":
        return tower, parts, {"model_type": "llama"}
    parts |= {"image_grid_pinpoints": ANYRES_GRIDS}
    return tower, parts, {"model_type": "mistral", "head_dim": 24, "sliding_window": None}


def grid_parts(family: str) -> Parts:
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    tower |= {"out_hidden_size": TEXT["hidden_size"], "initializer_range": 0.2}
    parts = {
        "image_token_id": IMAGE_TOKEN,
        "vision_start_token_id": IMAGE_TOKEN + 1,
        "vision_end_token_id": IMAGE_TOKEN + 2,
        "video_token_id": IMAGE_TOKEN + 3,
    }
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": MROPE_SECTIONS.get(family, [3, 3, 2]),
    }
    if family in PARTIAL_ROPE:
        rope["partial_rotary_factor"] = 0.5
    return (
        tower | GRID_TOWERS[family],
        parts,
        GRID_TEXTS.get(family, {}) | {"rope_parameters": rope},
    )


def internvl_parts(_family: str) -> Parts:
    tower = {"image_size": [28, 28], "patch_size": [7, 7]}
    tower |= {"use_qk_norm": True, "norm_type": "rms_norm"}
    parts = {"image_token_id": IMAGE_TOKEN, "image_seq_length": 4, "tie_word_embeddings": False}
    return tower, parts, {"model_type": "qwen2"}


def pixtral_parts(family: str) -> Parts:
    tower = {"image_size": 56, "patch_size": 7, "model_type": "pixtral", "head_dim": 16}
    parts = {"image_token_index": IMAGE_TOKEN, "tie_word_embeddings": False}
    parts |= {"vision_feature_layer": -1}
    if family == "pixtral":
        parts |= {"vision_feature_select_strategy": "full"}
    return tower, parts, {"model_type": "mistral", "head_dim": 24, "sliding_window": None}


def lfm2_parts(_family: str) -> Parts:
    tower = {"patch_size": 4, "num_patches": 16}
    tower |= {"model_type": "siglip2_vision_model", "vision_use_head": False}
    parts = {"image_token_id": IMAGE_TOKEN, "projector_hidden_size": 48}
    text = {"model_type": "lfm2", "block_auto_adjust_ff_dim": False}
    return tower, parts, text | {"layer_types": ["conv", "full_attention"]}


def gemma3_parts(_family: str) -> Parts:
    tower = {"image_size": 56, "patch_size": 14}
    tower |= {"model_type": "siglip_vision_model", "vision_use_head": False}
    parts = {
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": IMAGE_TOKEN + 1,
        "eoi_token_index": IMAGE_TOKEN + 2,
        "mm_tokens_per_image": 4,
    }
    text = {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": 9}
    text |= {"rms_norm_eps": 1e-3, "model_type": "gemma3_text"}
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    return tower, parts, text


def paligemma_parts(family: str) -> Parts:
    tower = {"image_size": 56, "patch_size": 14}
    tower |= {"model_type": "siglip_vision_model", "vision_use_head": False}
    parts = {"image_token_index": IMAGE_TOKEN, "projection_dim": 64, "hidden_size": 64}
    text = {"head_dim": 24, "rms_norm_eps": 1e-3, "model_type": "gemma", "num_image_tokens": 16}
    if family == "paligemma2":
        text |= {"model_type": "gemma2", "query_pre_attn_scalar": 40, "sliding_window": 512}
    return tower, parts, text


def gemma4_parts(family: str) -> Parts:
    tower = {"patch_size": 4, "head_dim": 16, "position_embedding_size": 256}
    tower |= {"num_key_value_heads": 2}
    parts = {
        "image_token_id": IMAGE_TOKEN,
        "boi_token_id": IMAGE_TOKEN + 1,
        "eoi_token_id": IMAGE_TOKEN + 2,
    }
    text = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "pad_token_id": 0}
    text |= {"rms_norm_eps": 1e-3, "layer_types": ["sliding_attention", "full_attention"]}
    if family == "gemma4_whole":
        text |= {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
    else:
        size = 258 + len(SPECIAL[family])
        text |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": size}
    return tower, parts, text


PARTS: dict[str, Callable[[str], Parts]] = {
    **dict.fromkeys(("smolvlm", "idefics3"), tile_parts),
    **dict.fromkeys(("llava", "llava_next"), llava_parts),
    **dict.fromkeys(GRIDS, grid_parts),
    "internvl": internvl_parts,
    **dict.fromkeys(("mistral3", "pixtral"), pixtral_parts),
    "gemma3": gemma3_parts,
    "lfm2_vl": lfm2_parts,
    **dict.fromkeys(("gemma4", "gemma4_whole"), gemma4_parts),
    **dict.fromkeys(("paligemma", "paligemma2"), paligemma_parts),
}
KINDS = {"pixtral": "llava", "gemma4_whole": "gemma4", "paligemma2": "paligemma"}  # of others


def vision_config(family: str, **changes: Any) -> transformers.PreTrainedConfig:
    """Return the config of a small model, with changes of its tower."""
    tower, parts, text = PARTS[family](family)
    tower |= changes
    tower = tower if family in GRIDS else TOWER | tower
    text = TEXT | {"vocab_size": 258 + len(SPECIAL[family])} | text
    kind = KINDS.get(family, family)
    return transformers.AutoConfig.for_model(kind, text_config=text, vision_config=tower, **parts)


def make_vision_folder(folder: Path, family: str, **changes: Any) -> Any:
    """Save a small random model with its processor and a tokenizer of bytes; return it in fp32.

    Args:
        changes: of its tower's config.
    """
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        vision_config(family, **changes), dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("bias", "input_projection_weight")):
            parameter.data += 0.3 * torch.randn_like(parameter)  # they start as ones and zeros
        if "gemma" in family and name.endswith("embed_tokens.weight"):
            parameter.data *= 0.1  # or its head, which is tied, says the last token again
        if family == "gemma3" and name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data += 2  # or it attends to all alike, and one image is as another
    model.generation_config.eos_token_id = TEXT["eos_token_id"]
    model.eval().save_pretrained(folder)
    save_tokenizer(folder, family)
    save_processor(folder, family)
    return model


def save_processor(folder: Path, family: str) -> None:
    """Save the settings of a processor, and of its image processor."""
    kind, settings = IMAGE_PROCESSORS[family]
    if kind == OWN_PROCESSOR:
        settings = {"image_processor_type": kind, **settings}
        (folder / "preprocessor_config.json").write_bytes(msgspec.json.encode(settings))
    else:
        getattr(transformers, kind)(**settings).save_pretrained(folder)
    (folder / "processor_config.json").write_bytes(msgspec.json.encode(PROCESSORS[family]))


def save_tokenizer(folder: Path, family: str) -> None:
    """Save a tokenizer whose tokens are bytes, and a chat template.

    Where published ones begin every text with a token of their own, this one does, too.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*BEGINNING, *SPECIAL[family]])
    if family in BEGUN:
        first = BEGINNING[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<s>"
    )
    fast.chat_template = TEMPLATES.get(family)  # PaliGemma's have none
    fast.save_pretrained(folder)


def picture(seed: int, width: int = 80, height: int = 60) -> Image.Image:
    """Return an image of random colors, blurred so that its size can change."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def joined(tensors: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return tensors of images as one, the smaller ones with zeros behind them."""
    shape = np.max([tensor.shape[1:] for tensor in tensors], axis=0, initial=0).astype(int)
    spaces = [
        [(0, 0), *((0, n - m) for n, m in zip(shape, t.shape[1:], strict=True))] for t in tensors
    ]
    return np.concatenate([np.pad(t, space) for t, space in zip(tensors, spaces, strict=True)])


def prepare(folder: Path, image: Image.Image) -> dict[str, npt.NDArray[Any]]:
    """Return what the model's own processor makes of one image."""
    tensors = stored_processor(folder)(image, return_tensors="np")
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}
