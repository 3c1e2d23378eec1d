"""A folder of random weights that several engines read: they choose the same experts."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

STD = 0.02
POOL = 1 << 26  # random numbers, of which each tensor has some in a row, or all again and again
INDEX = "model.safetensors.index.json"


def write_weights(folder: Path, config: dict[str, Any]) -> None:
    """Write a checkpoint of a config in bf16, with tensors as they are published, by layer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    generator = torch.Generator().manual_seed(0)
    pool = (torch.randn(POOL, generator=generator) * STD).to(torch.bfloat16)
    files: dict[str, str] = {}
    published = revert_weight_conversion(model, model.state_dict()).items()
    for part, tensors in groupby(published, key=lambda item: item[0].split(".")[:3]):
        file = f"{'.'.join(part)}.safetensors"
        weights = {
            name: random_tensor(name, pool, tensor.shape, generator) for name, tensor in tensors
        }
        save_file(weights, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(weights, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def random_tensor(
    name: str, pool: torch.Tensor, shape: torch.Size, generator: torch.Generator
) -> torch.Tensor:
    """Return ones for a norm, zeros for other vectors, else a part of `pool`."""
    if len(shape) == 1:
        return torch.full(shape, float("norm" in name), dtype=torch.bfloat16)
    size = shape.numel()
    start = int(torch.randint(POOL, (), generator=generator))
    parts = [pool[start : start + size]]
    while (missing := size - sum(map(len, parts))) > 0:
        parts.append(pool[:missing])
    return torch.cat(parts).reshape(shape)
