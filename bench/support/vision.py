"""Models that take images, as far as the processes around an engine read them."""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from headrace.model.tokenizer_json import read_tokenizer_json
from support.models import demo_model

Json = dict[str, Any]
TEMPLATE = (
    "{%% for m in messages %%}{%% if m.content is string %%}{{ m.content }}{%% else %%}"
    "{%% for part in m.content %%}{{ part.text or '%s' }}{%% endfor %%}{%% endif %%}{%% endfor %%}"
)
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
TEXT = {"hidden_size": 2048, "max_position_embeddings": 32768}
ANYRES = {"shortest_edge": 336}


@dataclass(frozen=True)
class Family:
    """What the files of a published model say of images."""

    special: tuple[str, ...]  # tokens; the first is that of a row
    settings: Json  # of the image processor
    decoder: str
    token: str = "image_token_id"  # the field with the first token
    prompts: Json = field(default_factory=dict)  # processor_config.json
    tower: Json = field(default_factory=dict)
    more: Json = field(default_factory=dict)  # of config.json; names of tokens become their ids
    placeholder: str = ""  # a template's; empty is the first token
    kind: str = ""  # of the config, where it is not the family's name


def named(kind: str, **settings: Any) -> Json:
    """Return the settings of an image processor."""
    return {"image_processor_type": kind, **settings}


MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
GLM = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>")
GEMMA3 = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
GEMMA4 = ("<|image|>", "<|image>", "<image|>")
SMOL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
LFM2 = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
SPLIT = [(row, column) for row in range(1, 7) for column in range(1, 7)]
FAMILIES = {
    "gemma3": Family(
        GEMMA3,
        named("Gemma3ImageProcessor", size={"height": 896, "width": 896}, **HALVES),
        "gemma3_text",
        "image_token_index",
        tower={"image_size": 896, "patch_size": 14},
        more={
            "boi_token_index": GEMMA3[1],
            "eoi_token_index": GEMMA3[2],
            "mm_tokens_per_image": 256,
        },
        placeholder=GEMMA3[1],
    ),
    "smolvlm": Family(
        (*SMOL, *(f"<row_{row}_col_{column}>" for row, column in SPLIT)),
        named(
            "SmolVLMImageProcessor",
            size={"longest_edge": 2048},
            max_image_size={"longest_edge": 512},
            **HALVES,
        ),
        "llama",
        prompts={"processor_class": "SmolVLMProcessor", "image_seq_len": 64},
        tower={"image_size": 512, "patch_size": 16},
    ),
    "llava_next": Family(
        ("<image>",),
        named("LlavaNextImageProcessor", size=ANYRES, crop_size={"height": 336, "width": 336}),
        "mistral",
        "image_token_index",
        prompts={
            "processor_class": "LlavaNextProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        tower={"image_size": 336, "patch_size": 14},
    ),
    "qwen3_vl": Family(
        QWEN,
        named(
            "Qwen2VLImageProcessor",
            size={"shortest_edge": 256**2, "longest_edge": 4096**2},
            patch_size=16,
            **HALVES,
        ),
        "qwen3_vl_text",
        prompts={"processor_class": "Qwen3VLProcessor"},
        tower={"patch_size": 16, "spatial_merge_size": 2, "deepstack_visual_indexes": [5, 11, 17]},
        more={"vision_start_token_id": QWEN[1], "video_token_id": QWEN[3]},
    ),
    "glm4v": Family(
        GLM,
        named(
            "Glm4vImageProcessor", size={"shortest_edge": 112 * 112, "longest_edge": 28**2 * 12288}
        ),
        "glm4v_text",
        prompts={"processor_class": "Glm4vProcessor"},
        tower={"patch_size": 14, "spatial_merge_size": 2},
        more={"image_start_token_id": GLM[1], "image_end_token_id": GLM[2]},
    ),
    "internvl": Family(
        ("<IMG_CONTEXT>", "<img>", "</img>"),
        named(
            "GotOcr2ImageProcessor",
            size={"height": 448, "width": 448},
            crop_to_patches=True,
            max_patches=12,
        ),
        "qwen2",
        prompts={"processor_class": "InternVLProcessor", "image_seq_length": 256},
        tower={"image_size": [448, 448], "patch_size": [14, 14]},
    ),
    "pixtral": Family(
        MARKS,
        named("PixtralImageProcessor", size={"longest_edge": 1024}, patch_size=16),
        "mistral",
        "image_token_index",
        prompts={"processor_class": "PixtralProcessor", "patch_size": 16},
        tower={"model_type": "pixtral", "image_size": 1024, "patch_size": 16},
        kind="llava",
    ),
    "mistral3": Family(
        MARKS,
        named("PixtralImageProcessor", size={"longest_edge": 1540}, patch_size=14),
        "mistral",
        "image_token_index",
        prompts={"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
        tower={"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    ),
    "gemma4": Family(
        GEMMA4,
        named("Gemma4ImageProcessor", patch_size=16, max_soft_tokens=280),
        "gemma4_text",
        prompts={"processor_class": "Gemma4Processor"},
        tower={"patch_size": 16},
        more={"boi_token_id": GEMMA4[1], "eoi_token_id": GEMMA4[2]},
    ),
    "lfm2_vl": Family(
        (*LFM2, *(f"<|img_row_{row}_col_{column}|>" for row, column in SPLIT)),
        named("Lfm2VlImageProcessor"),
        "lfm2",
        prompts={"processor_class": "Lfm2VlProcessor"},
        tower={"patch_size": 16},
    ),
    "paligemma": Family(
        ("<image>",),
        named("SiglipImageProcessor", size={"height": 448, "width": 448}, **HALVES),
        "gemma",
        "image_token_index",
        prompts={"processor_class": "PaliGemmaProcessor"},
        tower={"image_size": 448, "patch_size": 14},
    ),
}


@cache
def vision_folder(name: str = "gemma3") -> Path:
    """Return a folder with a family's image processor and the demo model's tokenizer.

    It has no weights. Sizes of images are those of published models.
    """
    family, folder = FAMILIES[name], Path(mkdtemp(prefix="headrace-bench-")) / name
    folder.mkdir()
    tokenizer = json.loads(read_tokenizer_json(demo_model()))
    first = 1 + max(tokenizer["model"]["vocab"].values())
    ids = {token: first + i for i, token in enumerate(family.special)}
    flags = {"special": True, "normalized": False, "single_word": False}
    flags |= {"lstrip": False, "rstrip": False}
    tokenizer["added_tokens"] += [{"id": id, "content": token} | flags for token, id in ids.items()]
    more = {
        key: ids.get(value, value) if isinstance(value, str) else value
        for key, value in family.more.items()
    }
    text = {"model_type": family.decoder, "vocab_size": first + len(ids), **TEXT}
    config = {
        "model_type": family.kind or name,
        "text_config": text,
        "vision_config": family.tower,
        family.token: first,
        "eos_token_id": 2,
        **more,
    }
    files = {
        "config": config,
        "tokenizer": tokenizer,
        "tokenizer_config": {"chat_template": TEMPLATE % (family.placeholder or family.special[0])},
        "preprocessor_config": family.settings,
        "processor_config": family.prompts,
    }
    for file, value in files.items():
        (folder / f"{file}.json").write_text(json.dumps(value))
    return folder
