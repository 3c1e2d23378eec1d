"""What the converter of llama.cpp writes of decoders without gates, beside what others have."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
ARCHITECTURES = {"gpt_neox": "gptneox", "phi": "phi2"}
NAMES = {
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "gpt_neox.layers": "blk",
    "embed_out": "output",
    "model.final_layernorm": "output_norm",
    ".attention_layernorm": ".attn_norm",
    ".feedforward_layernorm": ".ffn_norm",
    "attention.query_key_value": "attn_qkv",
    "self_attn.dense": "attn_output",
    "attention.dense.": "attn_output.",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}


def metadata(config: Any, architecture: str) -> Iterator[tuple[str, Any]]:
    """Return the keys that only these have."""
    if architecture == "starcoder2":
        yield "attention.layer_norm_epsilon", config.norm_epsilon
    if architecture == "nemotron":
        yield "attention.layer_norm_epsilon", config.norm_eps
    if architecture == "gptneox":
        yield "use_parallel_residual", config.use_parallel_residual


def xielu(state: Mapping[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Return the keys of Apertus' activation, which have no architecture before them."""
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        values = [v.item() for key, v in state.items() if key.endswith(f"act_fn.{name}")]
        if values:
            yield f"xielu.{name}", values


def converted(name: str, numbers: Floats, num_heads: int) -> Floats:
    """Return a tensor with all queries before all keys, and those before all values."""
    if "query_key_value" not in name:
        return numbers
    heads = numbers.reshape(num_heads, 3, -1, *numbers.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(numbers.shape)
