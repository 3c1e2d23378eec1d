"""Small random models that take images, on disk: the shapes of published ones, shrunk."""

from collections.abc import Sequence
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
    "qwen3_5": {"num_position_embeddings": 36},
}
GRID_TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"head_dim": 16},
    "qwen3_5": {
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
    },
}
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
SPECIAL["internvl"] = ("<IMG_CONTEXT>", "<img>", "</img>", "<|im_start|>", "<|im_end|>")
SPECIAL["mistral3"] = SPECIAL["pixtral"] = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
SPECIAL["idefics3"] = SPECIAL["smolvlm"]
SPECIAL["qwen3_vl"] = SPECIAL["qwen3_5"] = SPECIAL["qwen2_5_vl"]
IMAGE_TOKEN = 258
BEGUN = ("llava", "gemma3")  # families whose tokenizers begin each text with the first of these
FAMILIES = (
    "smolvlm",
    "idefics3",
    "llava",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "internvl",
    "mistral3",
    "pixtral",
    "gemma3",
)
SIZED = ("mistral3", "pixtral")  # families whose images only go together if they are of one size
GRIDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")  # families whose images have rows and columns
SPLITTING = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
IMAGE_PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "smolvlm": ("SmolVLMImageProcessorPil", SPLITTING),
    "idefics3": ("Idefics3ImageProcessorPil", SPLITTING),
    "llava": (
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
    ),
    "qwen2_5_vl": (
        "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}},
    ),
    "qwen3_vl": (
        "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}, "patch_size": 16},
    ),
    "qwen3_5": (
        "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}, "patch_size": 16},
    ),
    "internvl": (
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 28, "width": 28}, "max_patches": 4, "crop_to_patches": True},
    ),
    "mistral3": ("PixtralImageProcessorPil", {"size": {"longest_edge": 56}, "patch_size": 14}),
    "pixtral": ("PixtralImageProcessorPil", {"size": {"longest_edge": 28}, "patch_size": 7}),
    "gemma3": ("Gemma3ImageProcessorPil", {"size": {"height": 56, "width": 56}}),
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
    "qwen2_5_vl": {"processor_class": "Qwen2_5_VLProcessor"},
    "qwen3_vl": {"processor_class": "Qwen3VLProcessor"},
    "qwen3_5": {"processor_class": "Qwen3VLProcessor"},
    "internvl": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    "mistral3": {"processor_class": "PixtralProcessor", "patch_size": 7, "spatial_merge_size": 2},
    "pixtral": {"processor_class": "PixtralProcessor", "patch_size": 7},
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
}


def vision_config(family: str) -> transformers.PreTrainedConfig:
    """Return the config of a small model."""
    text = TEXT | {"vocab_size": 258 + len(SPECIAL[family])}
    parts: dict[str, Any]
    match family:
        case "smolvlm" | "idefics3":
            tower = TOWER | {"image_size": 32, "patch_size": 8, "model_type": f"{family}_vision"}
            parts = {"image_token_id": IMAGE_TOKEN, "scale_factor": 2, "pad_token_id": 256}
            text["model_type"] = "llama"
        case "llava":
            tower = TOWER | {"image_size": 28, "patch_size": 7, "projection_dim": 16}
            tower |= {"model_type": "clip_vision_model", "vocab_size": 16}
            parts = {"image_token_index": IMAGE_TOKEN, "image_seq_length": 16}
            text["model_type"] = "llama"
        case "qwen2_5_vl" | "qwen3_vl" | "qwen3_5":
            tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
            tower |= {"out_hidden_size": TEXT["hidden_size"], "initializer_range": 0.2}
            tower |= GRID_TOWERS[family]
            parts = {
                "image_token_id": IMAGE_TOKEN,
                "vision_start_token_id": IMAGE_TOKEN + 1,
                "vision_end_token_id": IMAGE_TOKEN + 2,
                "video_token_id": IMAGE_TOKEN + 3,
            }
            text |= GRID_TEXTS.get(family, {})
            text["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 3, 3] if family == "qwen2_5_vl" else [3, 3, 2],
            }
            if family == "qwen3_5":
                text["rope_parameters"]["partial_rotary_factor"] = 0.5
        case "internvl":
            tower = TOWER | {"image_size": [28, 28], "patch_size": [7, 7]}
            tower |= {"use_qk_norm": True, "norm_type": "rms_norm"}
            parts = {"image_token_id": IMAGE_TOKEN, "image_seq_length": 4}
            parts["tie_word_embeddings"] = False
            text["model_type"] = "qwen2"
        case "mistral3" | "pixtral":
            tower = TOWER | {"image_size": 56, "patch_size": 7, "model_type": "pixtral"}
            tower |= {"head_dim": 16}
            parts = {"image_token_index": IMAGE_TOKEN, "tie_word_embeddings": False}
            parts |= {"vision_feature_layer": -1}
            if family == "pixtral":
                parts |= {"vision_feature_select_strategy": "full"}
            text |= {"model_type": "mistral", "head_dim": 24, "sliding_window": None}
        case "gemma3":
            tower = TOWER | {"image_size": 56, "patch_size": 14}
            tower |= {"model_type": "siglip_vision_model", "vision_use_head": False}
            parts = {
                "image_token_index": IMAGE_TOKEN,
                "boi_token_index": IMAGE_TOKEN + 1,
                "eoi_token_index": IMAGE_TOKEN + 2,
                "mm_tokens_per_image": 4,
            }
            text |= {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": 9}
            text |= {"rms_norm_eps": 1e-3, "model_type": "gemma3_text"}
            text |= {"layer_types": ["sliding_attention", "full_attention"]}
    kind = "llava" if family == "pixtral" else family
    return transformers.AutoConfig.for_model(kind, text_config=text, vision_config=tower, **parts)


def make_vision_folder(folder: Path, family: str) -> Any:
    """Save a small random model with its processor and a tokenizer of bytes; return it in fp32."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        vision_config(family), dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("bias", "input_projection_weight")):
            parameter.data += 0.3 * torch.randn_like(parameter)  # they start as ones and zeros
        if family == "gemma3" and name.endswith("embed_tokens.weight"):
            parameter.data *= 0.1  # or its head, which is tied, says the last token again
        if family == "gemma3" and name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data += 2  # or it attends to all alike, and one image is as another
    model.generation_config.eos_token_id = TEXT["eos_token_id"]
    model.eval().save_pretrained(folder)
    save_tokenizer(folder, family)
    kind, settings = IMAGE_PROCESSORS[family]
    getattr(transformers, kind)(**settings).save_pretrained(folder)
    (folder / "processor_config.json").write_bytes(msgspec.json.encode(PROCESSORS[family]))
    return model


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
    fast.chat_template = TEMPLATES[family]
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
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    tensors = processor(images=[image], return_tensors="np")
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}
