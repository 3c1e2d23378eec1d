"""Adapters of random factors as PEFT saves them, and the same merged into a model of torch."""

import copy
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Any,
    seed: int,
    rank: int = 8,
    targets: tuple[str, ...] = LINEAR,
    std: float = 0.1,
    **config: Any,
) -> Any:
    """Save an adapter of a model in fp32; return the model with it merged into the weights."""
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(targets)}
    fields |= config
    rank_of: dict[str, int] = fields.get("rank_pattern", {})
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model), {}
    for name, module in merged.named_modules():
        kind = name.rpartition(".")[2]
        if kind not in targets:
            continue
        own = rank_of.get(kind, rank)
        rows, columns = module.weight.shape
        a = torch.randn(own, columns, generator=generator) * std
        b = torch.randn(rows, own, generator=generator) * std
        alpha = fields.get("alpha_pattern", {}).get(kind, fields["lora_alpha"])
        scale = alpha / (own**0.5 if fields.get("use_rslora") else own)
        weight = module.weight.detach() + scale * b @ a
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        if fields.get("use_dora"):
            norms = torch.linalg.norm(weight, dim=1)
            magnitude = norms * (0.5 + torch.rand(rows, generator=generator))
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = magnitude
            weight = weight * (magnitude / norms)[:, None]
        module.weight = torch.nn.Parameter(weight)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(msgspec.json.encode(fields))
    return merged


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the likeliest continuation, whatever token ends it."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return [int(id) for id in whole[0, len(prompt) :]]
