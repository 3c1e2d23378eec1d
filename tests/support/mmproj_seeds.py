"""Projector files that are right, for fuzzing: of zeros, without torch."""

import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gguf_files import TableEntry

from headrace.model.gguf import GgufFile
from headrace.model.mmproj import PROJECTORS, clip_metadata
from headrace.model.mmproj_weights import FAMILIES

ROW_SIZE = 32
VISION: dict[str, Any] = {
    "image_size": 28,
    "patch_size": 7,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "block_count": 2,
    "attention.head_count": 2,
    "attention.layer_norm_epsilon": 1e-6,
    "projection_dim": ROW_SIZE,
    "projector.scale_factor": 2,
    "preproc_image_size": 56,
    "n_wa_pattern": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


class MmprojSeed(NamedTuple):
    """A projector file in parts, and the decoder that it fits."""

    metadata: dict[str, Any]
    tensors: list[TableEntry]
    weights: bytes
    decoder: GgufFile


@cache
def mmproj_seed(name: str) -> MmprojSeed:
    """Return a file of a projector type."""
    projector = PROJECTORS[name]
    metadata = {f"clip.vision.{key}": value for key, value in VISION.items()}
    metadata |= {"general.architecture": "clip", "clip.projector_type": name}
    clip = clip_metadata(metadata)
    ids = {field: id for id, field in enumerate(projector.tokens)}
    family = projector.describe(clip, ids, ROW_SIZE).config["model_type"]
    tensors: list[TableEntry] = []
    end = 0
    for weight in dict(FAMILIES[family](clip, ROW_SIZE)).values():
        for tensor in weight.tensors:
            tensors.append((tensor, 0, weight.shape, end))
            end += 4 * math.prod(weight.shape)
    texts = [texts[0] for texts in projector.tokens.values()]
    (architecture, *_) = projector.architectures
    decoder = {
        "general.architecture": architecture,
        f"{architecture}.embedding_length": ROW_SIZE,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3] * len(texts),
    }
    file = GgufFile(Path("decoder.gguf"), decoder, [])
    return MmprojSeed(metadata, tensors, bytes(end), file)
