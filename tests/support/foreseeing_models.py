"""A model whose tokens follow from the last one, and layers that draft them from hidden states.

A layer that drafts never looks at the tokens that it is given. It computes the token beyond the
next from the hidden state before it. And it attends to what all hidden states of the text have in
common: where few of them are there, it drafts token 0, which never comes. So drafts are right, all
of them, where each hidden state is that of its text.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import make_byte_folder

VOCAB_SIZE, HIDDEN, HEAD_DIM = 257, 272, 16
CONSTANT, SEEN = VOCAB_SIZE, VOCAB_SIZE + 1  # coordinates behind those of tokens
SHARE = 0.1  # of a token's own coordinate, that these have
ALARM = 2000.0
EPS = 1e-9
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
Tensors = dict[str, torch.Tensor]


def next_token(token: int) -> int:
    """Return what follows a token: all but 0 are one circle."""
    return 3 * token % VOCAB_SIZE or 1


def gain(squares: float) -> float:
    """Return what an RMS norm multiplies by a vector whose numbers have this sum of squares."""
    return 1 / math.sqrt(squares / HIDDEN + EPS)


def save_foreseeing(folder: Path, eagle: Path) -> None:
    """Save the model with a layer of further tokens, and a folder of EAGLE-3 for it."""
    make_byte_folder(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    embed = torch.zeros(VOCAB_SIZE, HIDDEN)
    embed[:, :VOCAB_SIZE] = torch.eye(VOCAB_SIZE)
    embed[:, CONSTANT], embed[:, SEEN] = SHARE, -SHARE
    tensors = {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head(),
    }
    for layer in (0, 1):
        empty = {name: torch.zeros_like(tensor) for name, tensor in drafting_layer().items()}
        tensors |= under(f"model.layers.{layer}", empty)
    own = drafting_layer() | {name: torch.ones(HIDDEN) for name in ("enorm", "hnorm")}
    own["shared_head.norm"] = torch.ones(HIDDEN)
    own["eh_proj"] = torch.eye(HIDDEN, 2 * HIDDEN).roll(HIDDEN, 1) / gain(1 + 2 * SHARE**2)
    save_file(tensors | under("model.layers.2", own), folder / "model.safetensors")
    save_eagle(eagle)


def save_eagle(folder: Path) -> None:
    """Save a folder of EAGLE-3 with the model's head."""
    layer = drafting_layer() | {"hidden_norm": torch.ones(HIDDEN)}
    for name in ("q", "k", "v"):  # behind the embedding comes the hidden state
        own = layer[f"self_attn.{name}_proj"]
        layer[f"self_attn.{name}_proj"] = torch.cat([torch.zeros_like(own), own], 1)
    outer = {"norm.weight": torch.ones(HIDDEN), "fc.weight": torch.eye(HIDDEN, 3 * HIDDEN)}
    folder.mkdir()
    save_file(under("midlayer", layer) | outer, folder / "model.safetensors")
    aux = {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]}
    config = CONFIG | {"num_hidden_layers": 1, "eagle_config": aux}
    (folder / "config.json").write_text(json.dumps(config))


def head() -> torch.Tensor:
    """Return the head: what follows a token, and token 0 where hidden states were missed."""
    rows = torch.zeros(VOCAB_SIZE, HIDDEN)
    for token in range(VOCAB_SIZE):
        rows[next_token(token), token] = 1.0
    rows[0, CONSTANT] = rows[0, SEEN] = ALARM
    return rows


def drafting_layer() -> Tensors:
    """Return a layer that makes of a token's hidden state that of the next one.

    Attention takes from `SEEN` the mean of `CONSTANT` over all tokens. The MLP gives it back.
    """
    attended, passed = gain(1 + 2 * SHARE**2), gain(1 + 5 * SHARE**2)
    unit = passed * passed / (1 + math.exp(-passed))  # what the MLP makes of a coordinate
    v, o = torch.zeros(HEAD_DIM, HIDDEN), torch.zeros(HIDDEN, 2 * HEAD_DIM)
    v[0, CONSTANT], o[SEEN, 0] = 1.0, -1 / attended
    gate, down = torch.zeros(HIDDEN, HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    for token in range(VOCAB_SIZE):
        gate[token, token] = 1.0
        down[next_token(token), token] += 1 / unit
        down[token, token] -= 1 / unit
    gate[CONSTANT, CONSTANT], down[SEEN, CONSTANT] = 1 / SHARE, SHARE / unit
    return {
        "self_attn.q_proj": torch.zeros(2 * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": torch.zeros(HEAD_DIM, HIDDEN),
        "self_attn.v_proj": v,
        "self_attn.o_proj": o,
        "mlp.gate_proj": gate,
        "mlp.up_proj": gate.clone(),
        "mlp.down_proj": down,
        "input_layernorm": torch.ones(HIDDEN),
        "post_attention_layernorm": torch.ones(HIDDEN),
    }


def under(prefix: str, tensors: Tensors) -> Tensors:
    """Return weights with their whole names."""
    return {f"{prefix}.{name}.weight": tensor.contiguous() for name, tensor in tensors.items()}
