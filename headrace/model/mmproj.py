"""GGUF's projector files (`mmproj-*.gguf`): a vision tower and its projector, without a decoder.

llama.cpp's converter writes one beside the decoder's file. `read_mmproj` turns its metadata into
the JSON files of a Hugging Face folder of the family. What a file leaves out is as in the published
models. Source of keys and projector types: llama.cpp's mtmd.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from headrace.errors import ModelError
from headrace.model.gguf import GgufFile, read_metadata
from headrace.model.tokenizer_json import CONTROL, UNKNOWN, USER_DEFINED

Json = Mapping[str, Any]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
LayerCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 10)]
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
    use_gelu: bool = False
    use_silu: bool = False
    projector_type: str = ""
    vision_projector_type: str = ""
    has_vision_encoder: bool = True
    has_text_encoder: bool = False
    has_llava_projector: bool = False

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
    # Fields of the config, each with texts of its token; the first that the decoder has counts.
    tokens: Mapping[str, tuple[str, ...]]
    describe: Callable[[ClipMetadata, Mapping[str, int], int], FolderConfig]


@dataclass(frozen=True)
class Mmproj:
    """A projector file beside the decoder that it fits."""

    file: GgufFile
    projector: str
    clip: ClipMetadata
    row_size: int  # numbers of a row of an image: the decoder's hidden size
    folder: FolderConfig

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
    "idefics3": Projector(("llama",), {"image_token_id": ("<image>",)}, idefics3),
    "gemma3": Projector(
        ("gemma3",),
        {
            # Converters leave out what is past the SentencePiece model, `<image_soft_token>`.
            "image_token_index": ("<image_soft_token>", "<unused0>"),
            "boi_token_index": ("<start_of_image>",),
            "eoi_token_index": ("<end_of_image>",),
        },
        gemma3,
    ),
}


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
        row_size = clip.projection_dim
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
    tokens, kinds = (decoder.metadata.get(f"tokenizer.ggml.{k}") for k in ("tokens", "token_type"))
    if not (isinstance(tokens, list) and isinstance(kinds, list)):
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
