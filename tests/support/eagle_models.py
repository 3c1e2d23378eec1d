"""Tiny folders of EAGLE-3 beside a Llama, and the same in torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

VOCAB_SIZE, HEAD_SIZE, HIDDEN = 128, 40, 64
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
TAPPED = (1, 2, 3)


def norm(weight: torch.Tensor, x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return an RMS norm."""
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@dataclass
class EagleReference:
    """A model, and a layer that drafts for it."""

    model: Any
    layer: Any
    outer: dict[str, torch.Tensor]
    token_ids: torch.Tensor  # the model's, of the head's tokens
    norms_residual: bool

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """Return what the layer reads of the model's tokens."""
        states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        both = torch.cat([states[layer][0] for layer in TAPPED], -1)
        hidden: torch.Tensor = both @ self.outer["fc.weight"].T
        return hidden

    def drafted(self, tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the hidden states behind all tokens but the first.

        Args:
            hidden: of all tokens but the last.
        """
        embeds = self.model.model.embed_tokens(torch.tensor(tokens[1:]))
        normed = norm(self.outer["midlayer.hidden_norm.weight"], hidden)
        joined = torch.cat([self.layer.input_layernorm(embeds), normed], -1)[None]
        positions = torch.arange(joined.shape[1])[None]
        mask = torch.full((joined.shape[1], joined.shape[1]), -torch.inf).triu(1)[None, None]
        angles = self.model.model.rotary_emb(joined, positions)
        attended = self.layer.self_attn(
            joined, position_embeddings=angles, attention_mask=mask, position_ids=positions
        )[0][0]
        x = (normed if self.norms_residual else hidden) + attended
        x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        own = norm(self.outer["norm.weight"], x) @ self.outer["lm_head.weight"].T
        logits = torch.full((len(own), VOCAB_SIZE), -torch.inf)
        logits[:, self.token_ids] = own
        return logits, x


def save_eagle(model_folder: Path, folder: Path, *, norms_residual: bool = False) -> EagleReference:
    """Save a model, and a layer as it is published."""
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **CONFIG)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    model.save_pretrained(model_folder)
    layer = LlamaDecoderLayer(LlamaConfig(num_hidden_layers=1, **CONFIG), 0).eval()
    for name in ("q_proj", "k_proj", "v_proj"):
        size = getattr(layer.self_attn, name).out_features
        setattr(layer.self_attn, name, torch.nn.Linear(2 * HIDDEN, size, bias=False))
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(layer, name).weight.data = torch.rand(HIDDEN) + 0.5
    token_ids = torch.randperm(VOCAB_SIZE)[:HEAD_SIZE].sort().values
    outer = {
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN) / (3 * HIDDEN) ** 0.5,
        "midlayer.hidden_norm.weight": torch.rand(HIDDEN) + 0.5,
        "norm.weight": torch.rand(HIDDEN) + 0.5,
        "lm_head.weight": torch.randn(HEAD_SIZE, HIDDEN) / 4,
    }
    tensors = {f"midlayer.{name}": tensor for name, tensor in layer.state_dict().items()} | outer
    tensors["d2t"] = token_ids - torch.arange(HEAD_SIZE)
    tensors["t2d"] = torch.isin(torch.arange(VOCAB_SIZE), token_ids)
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    config = {name: value for name, value in CONFIG.items() if name != "attn_implementation"}
    own = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in TAPPED]}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": HEAD_SIZE,
        "eagle_config": own,
        "norm_before_residual": norms_residual,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return EagleReference(model, layer, outer, token_ids, norms_residual)
