"""Predicts the memory that a vision tower takes beside a decoder on the CPU."""

import math
from pathlib import Path
from typing import NamedTuple

from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.worker.checkpoints import safetensors
from headrace.engine_proc.worker.models.model import config_with_images
from headrace.model.gguf import read_metadata
from headrace.model.vision_families import why_no_core_tower

FP32_BYTES = 4
PARTS = (  # beginnings of the names of a tower's weights, and of its projector's
    "connector.",
    "embed_vision.",
    "image_newline",
    "multi_modal_projector.",
    "vision_model.",
    "vision_tower.",
    "visual.",
)
LAYERS = "encoder.layers."  # of whose matrices the C++ core keeps bf16
HEAD = ".head."  # of SigLIP, which the C++ core does not load


class TowerMemory(NamedTuple):
    """What the weights of a vision tower take."""

    stored_bytes: int = 0  # of the decoder's own files
    held_bytes: int = 0  # of memory, on a CPU


def tower_memory(config: ExecutionConfig) -> TowerMemory:
    """Return what a tower takes; nothing where no images are taken, or its weights are made up.

    Raises:
        ModelError: a file is missing or broken.
    """
    if config.image_row_size == 0 or config.load_format == "dummy":
        return TowerMemory()
    if config.mmproj is not None:
        shapes = (tensor.shape for tensor in read_metadata(Path(config.mmproj)).tensors)
        return TowerMemory(held_bytes=FP32_BYTES * sum(map(math.prod, shapes)))
    folder = Path(config.model_path)
    in_core = not why_no_core_tower(config_with_images(folder, None))
    stored = held = 0
    for name, (entry, data) in safetensors.read_folder(folder, None).items():
        if not name.removeprefix("model.").startswith(PARTS):
            continue
        is_kept = in_core and LAYERS in name and len(entry.shape) == 2 and entry.dtype == "BF16"
        stored += len(data)
        if not (in_core and HEAD in name):
            held += len(data) if is_kept else FP32_BYTES * math.prod(entry.shape)
    return TowerMemory(stored, held)
