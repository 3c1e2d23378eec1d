"""GGUF metadata, lowered to a `DecoderSpec`: what `lower` does for a `config.json`.

A GGUF file describes its model by llama.cpp's keys, `{architecture}.{key}`, and leaves some of it
to be seen from which tensors there are.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.models.config_fields import ConfigFields
from headrace.engine_proc.worker.models.decoder_spec import (
    DecoderSpec,
    LayerSpec,
    QKNorm,
    RopeTable,
)
from headrace.engine_proc.worker.models.rope import rope_table
from headrace.errors import ModelError

# What each architecture adds to the fields all share. Converters permute the rows of Llama's
# queries and keys so that rotated pairs are adjacent; we leave them so and rotate accordingly.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": QKNorm.PER_HEAD},
}
INTERLEAVED = {"llama"}
INERT = frozenset(
    {
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "tensor_data_layout",
        "vocab_size",  # the embedding is what tells, padding included
    }
)


def lower_gguf(metadata: Mapping[str, Any], tensors: Weights) -> DecoderSpec:
    """Lower a GGUF file.

    Args:
        tensors: under the file's own names.
    Raises:
        ModelError: an unknown architecture, or a known one with a key that is not supported.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture!r} is not supported in GGUF; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    if "token_embd.weight" not in tensors:
        raise ModelError("tensor 'token_embd.weight' is missing")
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
    fields = ConfigFields(values, f"a GGUF {architecture} model")
    spec = decoder(fields, architecture, tensors)
    fields.refuse_unread(INERT)
    return spec


def decoder(fields: ConfigFields, architecture: str, tensors: Weights) -> DecoderSpec:
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, head_dim) != head_dim:
            raise fields.wrong(name, f"{head_dim}, the length of a key")
    num_layers = fields.integer("block_count")
    if num_layers > len(tensors):
        raise fields.wrong("block_count", f"a number of layers that {len(tensors)} tensors make")
    if num_heads % num_kv_heads:
        raise fields.wrong("attention.head_count_kv", f"a divisor of {num_heads}")
    spec = DecoderSpec(
        architecture=architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=fields.integer("context_length"),
        layers=(LayerSpec(),) * num_layers,
        ropes=(rope(fields, head_dim, architecture in INTERLEAVED, tensors),),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        tied_head="output.weight" not in tensors,
        attention_scale=head_dim**-0.5,
    )
    return replace(spec, **ARCHITECTURES[architecture])


def rope(fields: ConfigFields, head_dim: int, interleaved: bool, tensors: Weights) -> RopeTable:
    """Lower RoPE. Llama 3's scaling comes as a tensor of divisors, one for each pair."""
    kind = fields.choice("rope.scaling.type", {"none": "default", "linear": "linear"}, "none")
    params: dict[str, Any] = {"rope_type": kind}
    factor = fields.get("rope.scaling.factor", 1.0)
    if kind == "linear":
        params["factor"] = factor
    table = rope_table(
        params,
        owner=fields.owner,
        head_dim=head_dim,
        max_position=fields.integer("context_length"),
        theta=fields.number("rope.freq_base", 10_000.0),
        interleaved=interleaved,
    )
    if "rope_freqs.weight" not in tensors:
        return table
    divisors = tensors["rope_freqs.weight"].to_float32()
    if divisors.shape != (head_dim // 2,):
        raise ModelError(
            f"tensor 'rope_freqs.weight' has shape {divisors.shape}, not {(head_dim // 2,)}"
        )
    inv_freq = np.array(table.inv_freq, np.float32) / divisors
    return replace(table, inv_freq=tuple(inv_freq.tolist()))
