"""Tiny models whose last layer predicts a token beyond the next, and the same in torch.

DeepSeek V3, GLM-4.5 and Qwen publish such layers; transformers does not run them. A layer here is
the last one of a random model of transformers, which is left with those before it.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hybrid_models import tiny_hybrid
from latent_models import tiny_latent
from mixture_models import tiny_mixture
from safetensors.torch import load_file, save_file

LAYERS = ["linear_attention", "full_attention", "full_attention"]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek_v3": (tiny_latent, {}),
    "glm4_moe": (tiny_mixture, {}),
    "qwen3_5_text": (tiny_hybrid, {"layer_types": LAYERS, "num_hidden_layers": 3}),
    "qwen3_next": (tiny_hybrid, {"layer_types": LAYERS, "num_hidden_layers": 3}),
}
FIELDS = {"qwen3_5_text": "mtp_num_hidden_layers", "qwen3_next": "mtp_num_hidden_layers"}
QWEN = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


@dataclass
class MtpReference:
    """A model without its last layer, and that layer with what stands around it."""

    model: Any
    layer: Any
    outer: dict[str, torch.Tensor]  # by the last part of DeepSeek's names

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """Return what the model's head sees, [tokens, hidden]."""
        hidden: torch.Tensor = self.model.model(torch.tensor([tokens])).last_hidden_state[0]
        return hidden

    def drafted(self, tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the logits and the hidden states behind all tokens but the first.

        Args:
            hidden: of all tokens but the last.
        """
        embeds = self.model.model.embed_tokens(torch.tensor(tokens[1:]))
        both = [self.norm("enorm", embeds), self.norm("hnorm", hidden)]
        x = (torch.cat(both, -1) @ self.outer["eh_proj"].T)[None]
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        angles = self.model.model.rotary_emb(x, positions)
        out = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        out = out[0] if isinstance(out, tuple) else out
        states = self.norm("shared_head.norm", out[0])
        return self.model.lm_head(states), states

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of the model, with other weights."""
        norm = copy.deepcopy(self.model.model.norm)
        norm.weight.data = self.outer[name]
        normed: torch.Tensor = norm(x)
        return normed


def make_mtp(case: str) -> tuple[Any, MtpReference]:
    """Return a model of all layers, and what is to be made of it."""
    make, differences = CASES[case]
    whole = make(case, **differences)
    size = whole.config.hidden_size
    norms = {name: torch.rand(size) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
    outer = {"eh_proj": torch.randn(size, 2 * size) / size**0.5, **norms}
    model = copy.deepcopy(whole)
    layer = model.model.layers.pop(-1)
    model.config.num_hidden_layers -= 1
    return whole, MtpReference(model, layer, outer)


def save_mtp(case: str, folder: Path) -> MtpReference:
    """Save a model of `CASES` as it is published."""
    whole, reference = make_mtp(case)
    whole.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    num_layers = config["num_hidden_layers"] - 1
    for name in ("layer_types", "mlp_layer_types"):
        if name in config:
            config[name].pop()
    field = FIELDS.get(case, "num_nextn_predict_layers")
    config |= {"num_hidden_layers": num_layers, field: 1}
    (folder / "config.json").write_text(json.dumps(config))
    last = f"model.layers.{num_layers}."
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{last}{name}.weight": tensor for name, tensor in reference.outer.items()}
    if case in FIELDS:
        tensors = {as_qwen(name, last): tensor for name, tensor in tensors.items()}
    else:  # copies, as published
        tensors[f"{last}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{last}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    return reference


def as_qwen(name: str, last: str) -> str:
    """Return Qwen's name of a tensor of the last layer."""
    if not name.startswith(last):
        return name
    module = name.removeprefix(last).removesuffix(".weight")
    return f"mtp.{QWEN[module]}.weight" if module in QWEN else f"mtp.layers.0.{name[len(last) :]}"
