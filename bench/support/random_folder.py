"""A folder of random weights that several engines read: they choose the same experts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

STD = 0.02
POOL = 1 << 27  # random numbers: as many as the largest tensor has, at least
INDEX = "model.safetensors.index.json"


def write_weights(folder: Path, config: dict[str, Any]) -> None:
    """Write a checkpoint of a config, in bf16, with each expert's matrices as published."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    generator = torch.Generator().manual_seed(0)
    pool = (torch.randn(POOL, generator=generator) * STD).to(torch.bfloat16).repeat(2)
    files: dict[str, str] = {}
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        file = f"model-{number:05}.safetensors"
        parts = {
            part: random_tensor(pool, shape, generator) for part, shape in published(name, tensor)
        }
        save_file(parts, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(parts, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def published(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Size]]:
    """Yield names and shapes of a tensor of transformers' module as checkpoints have them."""
    if ".experts." not in name:
        yield name, tensor.shape
        return
    stem, _, kind = name.rpartition(".")
    halves = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    rows = tensor.shape[1] // len(halves)
    for expert in range(tensor.shape[0]):
        for half in halves:
            yield f"{stem}.{expert}.{half}.weight", torch.Size((rows, tensor.shape[2]))


def random_tensor(
    pool: torch.Tensor, shape: torch.Size, generator: torch.Generator
) -> torch.Tensor:
    """Return ones for a norm, else a part of `pool` that begins anywhere."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    start = int(torch.randint(POOL, (), generator=generator))
    return pool[start : start + shape.numel()].reshape(shape).clone()
