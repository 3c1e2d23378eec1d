"""Adapters of random factors as PEFT saves them, and the same merged into a model of torch."""

import copy
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Any,
    seed: int,
    rank: int = 8,
    targets: tuple[str, ...] = LINEAR,
    std: float = 0.1,
    parameters: tuple[str, ...] = (),
    **config: Any,
) -> Any:
    """Save an adapter of a model in fp32; return the model with it merged into the weights.

    Args:
        parameters: stacks of experts, by the ends of their names.
    """
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
    if parameters:
        fields["target_parameters"] = list(parameters)
        scale = fields["lora_alpha"] / rank
        tensors |= adapt_stacks(merged, parameters, rank, std, scale, generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(msgspec.json.encode(fields))
    return merged


def adapt_stacks(
    model: Any, ends: tuple[str, ...], rank: int, std: float, scale: float, generator: Any
) -> dict[str, torch.Tensor]:
    """Change stacks of experts, [experts, out, in]; return the factors as PEFT saves them.

    PEFT wraps a module once for each of its parameters, the first innermost.
    """
    tensors = {}
    for module_name, module in model.named_modules():
        own = [n for n, p in module.named_parameters(recurse=False) if p.ndim == 3]
        own = [n for n in own if f"{module_name}.{n}".endswith(ends)]
        for depth, name in enumerate(reversed(own)):
            stack = getattr(module, name)
            is_transposed = getattr(module, "is_transposed", False)
            num_experts, rows, columns = (
                stack.transpose(1, 2).shape if is_transposed else stack.shape
            )
            a = torch.randn(num_experts * rank, columns, generator=generator) * std
            b = torch.randn(rows, rank * num_experts, generator=generator) * std
            by_expert = torch.einsum(
                "ore,eri->eoi", b.view(rows, rank, num_experts), a.view(num_experts, rank, columns)
            )
            delta = by_expert.transpose(1, 2) if is_transposed else by_expert
            stack.data += scale * delta
            wrapper = f"base_model.model.{module_name}{'.base_layer' * depth}"
            tensors |= {f"{wrapper}.lora_A.weight": a, f"{wrapper}.lora_B.weight": b}
    return tensors


def separately(folder: Path, names: dict[str, str], num_experts: int) -> None:
    """Have an adapter of stacks name each expert's layers, as PEFT does where they are modules.

    Args:
        names: of gate, up and down: what is put in place of `mlp.experts.`, with the expert.
    """
    path = folder / "adapter_model.safetensors"
    tensors = {}
    for name, factors in load_file(path).items():
        module, found, part = name.partition("mlp.experts.")
        if not found:
            tensors[name] = factors
            continue
        kinds = ("gate", "up") if part.startswith("base_layer") else ("down",)
        for expert in range(num_experts):
            rank = factors.shape[0 if "lora_A" in part else 1] // num_experts
            for i, kind in enumerate(kinds):
                own = factors[expert * rank :][:rank]
                if "lora_B" in part:
                    own = factors[:, expert::num_experts].chunk(len(kinds))[i]
                layer = f"{module}{names[kind].format(expert)}.{part.removeprefix('base_layer.')}"
                tensors[layer] = own.contiguous().clone()
    save_file(tensors, path)
    config = msgspec.json.decode((folder / "adapter_config.json").read_bytes())
    del config["target_parameters"]
    (folder / "adapter_config.json").write_bytes(msgspec.json.encode(config))


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
