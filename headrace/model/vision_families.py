"""Vision model families: where their configs describe the decoder and the images.

An image becomes rows, which the decoder takes in place of token embeddings. There is a row for each
image token in the prompt.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from headrace.errors import ModelError

# What transformers takes for fields that a published `text_config` leaves out.
LLAMA = MappingProxyType(
    {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }
)
GEMMA3 = MappingProxyType(
    {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    }
)
GEMMA = MappingProxyType(
    {
        "model_type": "gemma",
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
    }
)
GEMMA2 = MappingProxyType(
    {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
)
MISTRAL = MappingProxyType(
    {
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    }
)
# Decoders of a family that has several kinds, by `model_type`.
OTHER_DECODERS = MappingProxyType({"mistral": MISTRAL, "gemma2": GEMMA2})
# The same of a `vision_config`, of towers that are SigLIP.
TILED_SIGLIP = MappingProxyType(
    {
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 32,
        "layer_norm_eps": 1e-6,
    }
)
SIGLIP = MappingProxyType(
    {
        **TILED_SIGLIP,
        "model_type": "siglip_vision_model",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "patch_size": 16,
    }
)
SIGLIP2 = MappingProxyType({**SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 256})
# What the C++ core computes, where a tower's config says otherwise.
CORE_TOWER = MappingProxyType({"hidden_act": "gelu_pytorch_tanh", "num_channels": 3})
# Sides of a tile in patches, beside powers of two, at which transformers gives patches of Idefics3
# and SmolVLM their positions in order. At others its rounding skips some.
ORDERLY_SIDES = (26, 27)
# Fields that are not the decoder's, where a config has the two side by side.
NOT_THE_DECODERS = frozenset(
    {
        "image_token_id",
        "model_type",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
        "vision_token_id",
    }
)


@dataclass(frozen=True)
class VisionFamily:
    """The config fields of one family."""

    image_token: str  # the field with the token that stands for each row of an image
    decoder: Mapping[str, Any]  # fields of a decoder of this model_type that may be left out
    tied_head: bool = False  # likewise
    tied_by_text: bool = True  # `tie_word_embeddings` of the text_config counts, too
    sees_whole: bool = False  # as `sees_whole`, where no config says otherwise
    is_prefix_lm: bool = False  # all tokens of a prompt see each other, later ones included
    # Layers of the tower whose features are added behind the decoder's first layers, where
    # `deepstack_visual_indexes` leaves them out.
    deepstack: tuple[int, ...] = ()
    # Fields of a tower that is SigLIP, which may be left out; empty is another tower. With a
    # `model_type`, transformers takes towers of other types, too.
    siglip: Mapping[str, Any] = field(default_factory=dict)
    rounds_positions: bool = False  # transformers finds positions of patches by rounding
    pooled_rows: int = 0  # rows that squares of patches become, where no config says otherwise


FAMILIES = {
    **dict.fromkeys(
        ("idefics3", "smolvlm"),
        VisionFamily(
            "image_token_id",
            {**LLAMA, "rms_norm_eps": 1e-5},
            siglip=TILED_SIGLIP,
            rounds_positions=True,
        ),
    ),
    "llava": VisionFamily("image_token_index", LLAMA),
    "llava_next": VisionFamily("image_token_index", LLAMA),
    "qwen2_5_vl": VisionFamily("image_token_id", {"model_type": "qwen2_5_vl_text"}),
    "qwen3_vl": VisionFamily(
        "image_token_id", {"model_type": "qwen3_vl_text"}, deepstack=(8, 16, 24)
    ),
    "qwen3_vl_moe": VisionFamily(
        "image_token_id",
        {"model_type": "qwen3_vl_moe_text"},
        tied_by_text=False,
        deepstack=(8, 16, 24),
    ),
    "qwen3_5": VisionFamily("image_token_id", {"model_type": "qwen3_5_text"}),
    "qwen3_5_moe": VisionFamily("image_token_id", {"model_type": "qwen3_5_moe_text"}),
    "glm4v": VisionFamily("image_token_id", {"model_type": "glm4v_text"}),
    "glm4v_moe": VisionFamily(
        "image_token_id", {"model_type": "glm4v_moe_text", "attention_bias": True}
    ),
    "internvl": VisionFamily("image_token_id", {"model_type": "qwen2"}, tied_head=True),
    "mistral3": VisionFamily("image_token_index", {"model_type": "mistral"}, tied_head=True),
    "gemma3": VisionFamily(
        "image_token_index",
        GEMMA3,
        tied_head=True,
        sees_whole=True,
        siglip=SIGLIP,
        pooled_rows=256,
    ),
    "gemma4": VisionFamily("image_token_id", {"model_type": "gemma4_text"}, tied_head=True),
    "paligemma": VisionFamily(
        "image_token_index", GEMMA, tied_head=True, is_prefix_lm=True, siglip=SIGLIP
    ),
    "lfm2_vl": VisionFamily(
        "image_token_id", {"model_type": "lfm2"}, tied_head=True, siglip=SIGLIP2
    ),
}

BIDIRECTIONAL = "use_bidirectional_attention"  # of Gemma 4

# Models that take images, of which only the decoder is served: images are refused. Those that are
# among FAMILIES, too, take images unless they are quantized.
TEXT_ONLY = frozenset({"gemma3n", "gemma4", "qwen3_5", "qwen3_5_moe"})


def vision_family(config: Mapping[str, Any]) -> VisionFamily | None:
    """Return the family of a config; None if it takes no images."""
    if not isinstance(config.get("vision_config"), dict):
        return None
    kind = str(config.get("model_type"))
    if kind in TEXT_ONLY and config.get("quantization_config"):
        return None
    return FAMILIES.get(kind)


def sees_whole(config: Mapping[str, Any]) -> bool:
    """Whether the tokens of an image see each other, later ones included."""
    family = vision_family(config)
    if family is None:
        return False
    return family.sees_whole or decoder_config(config).get(BIDIRECTIONAL) == "vision"


def is_prefix_lm(config: Mapping[str, Any]) -> bool:
    """Whether the tokens of a prompt see each other, later ones included."""
    family = vision_family(config)
    return family is not None and family.is_prefix_lm


def num_deepstack(config: Mapping[str, Any]) -> int:
    """Return how many further parts an image's row has, for the decoder's first layers.

    Raises:
        ModelError: the config's list of them is none.
    """
    family = vision_family(config)
    if family is None or not family.deepstack:
        return 0
    layers = config["vision_config"].get("deepstack_visual_indexes", family.deepstack)
    if not isinstance(layers, list | tuple):
        raise ModelError(f"'deepstack_visual_indexes' is {layers!r:.40}, not a list of layers")
    return len(layers)


def siglip_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a tower that the C++ core runs, with the fields that it leaves out."""
    return {**FAMILIES[config["model_type"]].siglip, **config["vision_config"]}


def why_no_core_tower(config: Mapping[str, Any]) -> str:
    """Return why transformers' modules run a model's vision tower; "" where the C++ core does."""
    family = vision_family(config)
    if family is None or not family.siglip:
        return f"the tower of a {config.get('model_type')} model is no SigLIP"
    tower = siglip_config(config)
    own_type = {name: family.siglip[name] for name in ("model_type",) if name in family.siglip}
    for name, value in {**CORE_TOWER, **own_type}.items():
        if tower.get(name, value) not in (None, value):
            return f"its {name} is {tower[name]!r:.40}, not {value!r}"
    if config.get("projector_hidden_act") not in (None, "gelu"):
        return f"its projector_hidden_act is {config['projector_hidden_act']!r:.40}, not 'gelu'"
    return why_no_core_grid(config, family, tower["image_size"], tower["patch_size"])


def why_no_core_grid(
    config: Mapping[str, Any], family: VisionFamily, image_size: Any, patch_size: Any
) -> str:
    """Return why the C++ core takes no tiles of such sizes; "" where it does, or nothing would."""
    if not all(isinstance(size, int) and size > 0 for size in (image_size, patch_size)):
        return ""
    side = image_size // patch_size
    if family.rounds_positions and side & (side - 1) and side not in ORDERLY_SIDES:
        return f"transformers skips some positions of {side} patches a side"
    rows = family.pooled_rows and config.get("mm_tokens_per_image", family.pooled_rows)
    if isinstance(rows, int) and rows > 0 and side % math.isqrt(rows):
        return f"{math.isqrt(rows)} rows a side do not divide {side} patches"
    return ""


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's part of a config; the whole config if it has no parts."""
    family = vision_family(config)
    nested = config.get("text_config")
    if family is None:
        if not isinstance(nested, dict):
            return config
        is_tied = config.get("model_type") in TEXT_ONLY and config.get("tie_word_embeddings")
        return {**nested, "tie_word_embeddings": True} if is_tied else nested
    if not isinstance(nested, dict):
        nested = {name: value for name, value in config.items() if name not in NOT_THE_DECODERS}
    kind = nested.get("model_type", family.decoder["model_type"])
    defaults = family.decoder
    if kind != family.decoder["model_type"]:  # LLaVA-NeXT and PaliGemma have decoders of two kinds
        defaults = OTHER_DECODERS.get(kind, {})
    is_tied = config.get("tie_word_embeddings", family.tied_head)
    is_tied = is_tied or (family.tied_by_text and nested.get("tie_word_embeddings", False))
    return {**defaults, **nested, "tie_word_embeddings": is_tied}
