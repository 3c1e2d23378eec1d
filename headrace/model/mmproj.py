"""GGUF's projector files (`mmproj-*.gguf`): a vision tower and its projector, without a decoder.

llama.cpp's converter writes one beside the decoder's file. `read_mmproj` turns its metadata into
the JSON files of a Hugging Face folder of the family. What a file leaves out is as in the published
models. Source of keys and projector types: llama.cpp's mtmd.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from headrace.errors import ModelError
from headrace.model.gguf import GgufFile, read_metadata
from headrace.model.gguf_metadata import CONTROL, UNKNOWN, USER_DEFINED, vocabulary_of

Json = Mapping[str, Any]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
LayerCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 10)]
Pixels = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Epsilon = Annotated[float, msgspec.Meta(ge=0, le=1)]
Channels = Annotated[list[float], msgspec.Meta(min_length=3, max_length=3)]

ARCHITECTURE = "clip"  # llama.cpp's, of these files
MATCHED = (UNKNOWN, CONTROL, USER_DEFINED)  # tokens that a text can name
TOP = {"has_llava_projector", "has_text_encoder", "has_vision_encoder", "projector_type"}
TOP |= {"use_gelu", "use_silu"}
DOTTED = {
    "head_count": "attention.head_count",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "scale_factor": "projector.scale_factor",
    "vision_projector_type": "projector_type",
}


def key_of(field: str) -> str:
    """Return the key of a field of `ClipMetadata`."""
    return f"clip.{field}" if field in TOP else f"clip.vision.{DOTTED.get(field, field)}"


class ClipMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=key_of):
    """`clip.*` of a file. Any other key may change the result, so it is refused."""

    image_size: Count
    patch_size: Count
    embedding_length: Count
    feed_forward_length: Count
    block_count: LayerCount
    head_count: Count
    layer_norm_epsilon: Epsilon
    image_mean: Channels
    image_std: Channels
    projection_dim: int = 0
    scale_factor: Count | None = None  # patches that become one row, each way
    preproc_image_size: Count | None = None
    spatial_merge_size: Count = 2
    n_wa_pattern: Count | None = (
        None  # of so many layers, the last sees the whole image; of Qwen2.5-VL
    )
    window_size: Count = 112
    image_min_pixels: Pixels | None = None
    image_max_pixels: Pixels | None = None
    feature_layer: list[int] = []
    use_gelu: bool = False
    use_silu: bool = False
    projector_type: str = ""
    vision_projector_type: str = ""
    has_vision_encoder: bool = True
    has_text_encoder: bool = False
    has_llava_projector: bool = False
    image_aspect_ratio: str = ""  # this and the next say how the model was trained
    mm_projector_type: str = ""

    @property
    def side(self) -> int:
        """Number of patches of an image, each way."""
        return self.image_size // self.patch_size

    def merged_side(self, merged: int) -> int:
        """Return the number of rows of an image, each way, where `merged` patches become one.

        Raises:
            ModelError: the patches are not a multiple.
        """
        if self.side == 0 or self.side % merged:
            raise ModelError(
                f"its images of {self.image_size} pixels have {self.side} patches each way, not a "
                f"multiple of {merged}"
            )
        return self.side // merged

    def activation(self, gelu: str) -> str:
        """Return the activation of its layers; `gelu` is the family's."""
        return gelu if self.use_gelu else "silu" if self.use_silu else "quick_gelu"


class FolderConfig(NamedTuple):
    """A file, described as a folder is."""

    config: Json  # config.json
    image_processor: str  # a class of transformers
    image_settings: Json  # of the image processor
    settings: Json  # processor_config.json


@dataclass(frozen=True)
class Projector:
    """A projector type: the decoders it fits, its tokens, and its family in transformers."""

    architectures: tuple[str, ...]
    image_text: str  # what a chat template of the family writes for an image
    # Fields of the config, each with texts of its token; the first that the decoder has counts.
    tokens: Mapping[str, tuple[str, ...]]
    describe: Callable[[ClipMetadata, Mapping[str, int], int], FolderConfig]
    # The tensor with as many rows as a row of an image has numbers; "": `projection_dim` says it.
    rows: str = ""


@dataclass(frozen=True)
class Mmproj:
    """A projector file beside the decoder that it fits."""

    file: GgufFile
    projector: str
    clip: ClipMetadata
    row_size: int  # numbers of a row of an image: the decoder's hidden size
    folder: FolderConfig

    @property
    def image_text(self) -> str:
        """What a chat template of the family writes for an image."""
        return PROJECTORS[self.projector].image_text

    @property
    def family(self) -> str:
        """A key of `vision_families.FAMILIES`."""
        return str(self.folder.config["model_type"])


def idefics3(clip: ClipMetadata, tokens: Mapping[str, int], row_size: int) -> FolderConfig:
    """Idefics3 and SmolVLM, which compute alike."""
    merged = clip.scale_factor or 2
    config = {
        "model_type": "idefics3",
        "scale_factor": merged,
        "vision_config": tower_config(clip, "idefics3_vision", "gelu_pytorch_tanh"),
        "text_config": text_config("llama", row_size),
        **tokens,
    }
    longest = clip.preproc_image_size or 4 * clip.image_size
    sizes = {
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": clip.image_size},
    }
    settings = {
        "processor_class": "Idefics3Processor",
        "image_seq_len": clip.merged_side(merged) ** 2,
    }
    return FolderConfig(config, "Idefics3ImageProcessorPil", {**sizes, **levels(clip)}, settings)


def gemma3(clip: ClipMetadata, tokens: Mapping[str, int], row_size: int) -> FolderConfig:
    """Gemma 3."""
    num_rows = clip.merged_side(clip.scale_factor or 4) ** 2
    tower = tower_config(clip, "siglip_vision_model", "gelu_pytorch_tanh")
    config = {
        "model_type": "gemma3",
        "mm_tokens_per_image": num_rows,
        "vision_config": {**tower, "vision_use_head": False},
        "text_config": text_config("gemma3_text", row_size),
        **tokens,
    }
    sizes = {"size": {"height": clip.image_size, "width": clip.image_size}}
    settings = {"processor_class": "Gemma3Processor", "image_seq_length": num_rows}
    return FolderConfig(config, "Gemma3ImageProcessorPil", {**sizes, **levels(clip)}, settings)


def qwen2_5_vl(clip: ClipMetadata, tokens: Mapping[str, int], row_size: int) -> FolderConfig:
    """Qwen2.5-VL. Files have no limits of an image's size; the published ones are taken."""
    if not clip.n_wa_pattern:
        raise ModelError("clip.vision.n_wa_pattern is missing")
    if not math.isclose(clip.layer_norm_epsilon, 1e-6, rel_tol=1e-3):
        raise ModelError(
            f"clip.vision.attention.layer_norm_epsilon is {clip.layer_norm_epsilon:g}, not 1e-06"
        )
    if clip.window_size < clip.patch_size * clip.spatial_merge_size:
        raise ModelError(
            f"clip.vision.window_size is {clip.window_size}, below the "
            f"{clip.patch_size * clip.spatial_merge_size} pixels of a row"
        )
    whole = range(clip.n_wa_pattern - 1, clip.block_count, clip.n_wa_pattern)
    config = {
        "model_type": "qwen2_5_vl",
        "vision_config": {
            "depth": clip.block_count,
            "hidden_size": clip.embedding_length,
            "intermediate_size": clip.feed_forward_length,
            "num_heads": clip.head_count,
            "patch_size": clip.patch_size,
            "spatial_merge_size": clip.spatial_merge_size,
            "temporal_patch_size": 2,
            "window_size": clip.window_size,
            "fullatt_block_indexes": list(whole),
            "out_hidden_size": row_size,
            "hidden_act": clip.activation("gelu"),
        },
        "text_config": text_config("qwen2_5_vl_text", row_size),
        **tokens,
    }
    sizes = {
        "patch_size": clip.patch_size,
        "merge_size": clip.spatial_merge_size,
        "temporal_patch_size": 2,
        "size": {
            "shortest_edge": clip.image_min_pixels or QWEN_PIXELS[0],
            "longest_edge": clip.image_max_pixels or QWEN_PIXELS[1],
        },
    }
    settings = {"processor_class": "Qwen2_5_VLProcessor"}
    return FolderConfig(config, "Qwen2VLImageProcessorPil", {**sizes, **levels(clip)}, settings)


def llava(clip: ClipMetadata, tokens: Mapping[str, int], row_size: int) -> FolderConfig:
    """LLaVA 1.5, whose files lack the layers after the one whose output counts."""
    if clip.feature_layer not in ([], [clip.block_count]):
        raise ModelError(
            f"clip.vision.feature_layer is {clip.feature_layer!r:.40}, not the last of "
            f"{clip.block_count} layers"
        )
    clip.merged_side(1)  # to check it
    config = {
        "model_type": "llava",
        "vision_feature_layer": clip.block_count,
        "vision_feature_select_strategy": "default",
        "vision_config": tower_config(clip, "clip_vision_model", "gelu"),
        "text_config": text_config("llama", row_size),
        **tokens,
    }
    size = clip.image_size
    sizes = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
    settings = {
        "processor_class": "LlavaProcessor",
        "patch_size": clip.patch_size,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": "<image>",
    }
    return FolderConfig(config, "CLIPImageProcessorPil", {**sizes, **levels(clip)}, settings)


def tower_config(clip: ClipMetadata, model_type: str, gelu: str) -> Json:
    """Return the `vision_config` of a vision transformer."""
    return {
        "model_type": model_type,
        "hidden_size": clip.embedding_length,
        "intermediate_size": clip.feed_forward_length,
        "num_hidden_layers": clip.block_count,
        "num_attention_heads": clip.head_count,
        "image_size": clip.image_size,
        "patch_size": clip.patch_size,
        "layer_norm_eps": clip.layer_norm_epsilon,
        "hidden_act": clip.activation(gelu),
    }


def text_config(model_type: str, row_size: int) -> Json:
    """Return the `text_config`, of a decoder that is not loaded from it."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    return {"model_type": model_type, "hidden_size": row_size, **heads}


def levels(clip: ClipMetadata) -> Json:
    """Return how an image processor normalizes levels."""
    return {"image_mean": clip.image_mean, "image_std": clip.image_std}


PROJECTORS = {
    "idefics3": Projector(("llama",), "<image>", {"image_token_id": ("<image>",)}, idefics3),
    "gemma3": Projector(
        ("gemma3",),
        "<start_of_image>",
        {
            # Converters leave out what is past the SentencePiece model, `<image_soft_token>`.
            "image_token_index": ("<image_soft_token>", "<unused0>"),
            "boi_token_index": ("<start_of_image>",),
            "eoi_token_index": ("<end_of_image>",),
        },
        gemma3,
    ),
    "qwen2.5vl_merger": Projector(
        ("qwen2vl",),
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "image_token_id": ("<|image_pad|>",),
            "vision_start_token_id": ("<|vision_start|>",),
            "vision_end_token_id": ("<|vision_end|>",),
        },
        qwen2_5_vl,
    ),
    "mlp": Projector(
        ("llama", "qwen2", "phi3"),
        "<image>",
        # Vocabularies of text models have no token of images; no text becomes one of the others.
        {"image_token_index": ("<image>", "<|reserved_special_token_0|>", "<unk>")},
        llava,
        rows="mm.2.weight",
    ),
}
QWEN_PIXELS = (56 * 56, 16384 * 28 * 28)  # least and most, of published models


def projector_of(metadata: Json) -> str:
    """Return a file's projector type; "" if it has none."""
    return str(
        metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type", "")
    )


def read_mmproj(path: Path, decoder: GgufFile) -> Mmproj:
    """Read a projector file but for its weights.

    Raises:
        ModelError: it is none, it is of a type that is not known here, it contradicts itself, or it
            does not fit the decoder.
    """
    file = read_metadata(path)
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ModelError(
            f"{path}: its architecture is {architecture!r:.40}, not {ARCHITECTURE!r}, that of a "
            "projector file; --mmproj takes an mmproj-*.gguf"
        )
    name = projector_of(file.metadata)
    if name not in PROJECTORS:
        raise ModelError(
            f"{path}: projector {name!r:.40} is not supported; supported are "
            f"{', '.join(PROJECTORS)}"
        )
    projector = PROJECTORS[name]
    try:
        clip = clip_metadata(file.metadata)
        row_size = row_size_of(projector, clip, file)
        check_decoder(projector, row_size, decoder)
        folder = projector.describe(clip, token_ids(projector, decoder), row_size)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    return Mmproj(file, name, clip, row_size, folder)


def clip_metadata(metadata: Json) -> ClipMetadata:
    """Return `clip.*` of a file.

    Raises:
        ModelError: a key is missing, of another type, out of bounds or not known here.
    """
    keys = {key: value for key, value in metadata.items() if key.startswith("clip.")}
    try:
        clip = msgspec.convert(keys, ClipMetadata)
    except msgspec.ValidationError as error:
        raise ModelError(f"its clip.* cannot be used: {error}") from None
    if clip.embedding_length % clip.head_count:
        raise ModelError(
            f"clip.vision.embedding_length is {clip.embedding_length}, not a multiple of "
            f"clip.vision.attention.head_count, {clip.head_count}"
        )
    if not all(deviation > 0 for deviation in clip.image_std):
        raise ModelError(f"clip.vision.image_std is {clip.image_std!r:.60}, not above 0")
    return clip


def row_size_of(projector: Projector, clip: ClipMetadata, file: GgufFile) -> int:
    """Return how many numbers a row of an image has.

    Raises:
        ModelError: the tensor that tells it is missing.
    """
    if not projector.rows:
        return clip.projection_dim
    for tensor in file.tensors:
        if tensor.name == projector.rows:
            return tensor.shape[0]
    raise ModelError(f"tensor {projector.rows!r} is missing")


def check_decoder(projector: Projector, row_size: int, decoder: GgufFile) -> None:
    """Check that a decoder takes the rows of a projector.

    Raises:
        ModelError: it does not.
    """
    architecture = decoder.metadata.get("general.architecture")
    if architecture not in projector.architectures:
        raise ModelError(
            f"its projector is for decoders of architecture {' or '.join(projector.architectures)},"
            f" and {decoder.path.name} is {architecture!r:.40}"
        )
    size = decoder.metadata.get(f"{architecture}.embedding_length")
    if size != row_size:
        raise ModelError(
            f"its rows have {row_size} numbers, and those of {decoder.path.name} {size!r:.40}: it "
            "is the projector of another model"
        )


def token_ids(projector: Projector, decoder: GgufFile) -> dict[str, int]:
    """Return the ids of a projector's tokens, by field of the config.

    Raises:
        ModelError: the decoder's vocabulary lacks one.
    """
    tokens, kinds = (
        vocabulary_of(decoder.metadata),
        decoder.metadata.get("tokenizer.ggml.token_type"),
    )
    if tokens is None or not isinstance(kinds, list):
        raise ModelError(f"{decoder.path.name} has no tokens of its own kinds")
    found = {
        text: id
        for id, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in MATCHED
    }
    return {field: first_of(texts, found, decoder) for field, texts in projector.tokens.items()}


def first_of(texts: Sequence[str], found: Mapping[str, int], decoder: GgufFile) -> int:
    """Return the id of the first text that is a token."""
    for text in texts:
        if text in found:
            return found[text]
    raise ModelError(f"{decoder.path.name} lacks the token {' or '.join(texts)} of its images")
