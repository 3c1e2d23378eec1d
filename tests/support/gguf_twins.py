"""Small random models of transformers, written as llama.cpp's converter writes them.

To the bit, the tensors are those that the converter of llama-cpp-python 0.3.36 makes of the same
models. So are the keys, but for some that repeat a default.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import gguf_gemmas
import gguf_hybrids
import gguf_latents
import gguf_mambas
import gguf_mixtures
import gguf_ungated
import numpy as np
import numpy.typing as npt
from demo_in_transformers import GGUF_NAMES, permuted
from random_models import random_model

Floats = npt.NDArray[np.float32]
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": [5, 6],
    "pad_token_id": 0,
}
ARCHITECTURES = {  # that are not called as in transformers
    "cohere": "command-r",
    "gemma3_text": "gemma3",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
    "mistral": "llama",
    "olmo3": "olmo2",
    **gguf_mixtures.ARCHITECTURES,
    **gguf_hybrids.ARCHITECTURES,
    **gguf_mambas.ARCHITECTURES,
    **gguf_latents.ARCHITECTURES,
    **gguf_ungated.ARCHITECTURES,
    **gguf_gemmas.ARCHITECTURES,
}
PERMUTED = {"llama", "arcee", "mistral3", "granite", "granitemoe", "granite_swa", "smollm3"}
ONE_PLUS = {"gemma", "gemma2", "gemma3", "nemotron"}
WINDOWED = {"gemma2", "gemma3", "phi3", "olmo2", "exaone4", "cohere2", "granite_swa", "gpt-oss"}
LISTED = {"olmo2", "exaone4", "granite_swa"}  # their files list the layers that slide
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
NAMES = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate_up_proj": "ffn_up",
    **gguf_hybrids.NAMES,
    **gguf_latents.NAMES,
    **gguf_ungated.NAMES,
    **GGUF_NAMES,
}
FIELDS = {
    "attention_multiplier": "attention.scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "final_logit_softcapping": "final_logit_softcapping",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "logit_scale": "logit_scale",
    "logits_scaling": "logit_scale",
    "residual_multiplier": "residual_scale",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def tiny_model(model_type: str, **differences: Any) -> Any:
    """Make a random model. None for a field of `TINY` leaves it to the family."""
    left = {name for name in TINY if differences.get(name, TINY[name]) is None}
    fields = {name: value for name, value in (TINY | differences).items() if name not in left}
    return random_model(model_type, fields)


def write_gguf(
    path: Path,
    model: Any,
    *,
    extra: Mapping[str, Floats] = MappingProxyType({}),
    architecture: str | None = None,
    keys: Mapping[str, Any] = MappingProxyType({}),
    fuse_qkv: bool = False,
    fuse_experts: bool = False,
    split_max_tensors: int = 0,
) -> Path:
    """Write a model.

    Args:
        architecture: what the file calls itself, where that is not the model's own.
        extra: tensors beside the model's.
        keys: of the architecture; they replace the model's own; None leaves one out.
        fuse_qkv: write queries, keys and values as one tensor, as the converter can.
        fuse_experts: write gate and up of the experts as one tensor, as the converter can.
    """
    config = model.config
    architecture = architecture or architecture_of(config)
    described, own = metadata(config, architecture), tensors(model, architecture)
    for others in (gguf_mambas, gguf_gemmas):
        if config.model_type in others.ARCHITECTURES:
            described = others.metadata(config, architecture)
            own = others.tensors(model, architecture)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    for key, value in {**dict(described), **keys}.items():
        if value is not None:
            add(writer, f"{architecture}.{key}", value)
    for key, value in gguf_ungated.xielu(model.state_dict()):
        add(writer, key, value)
    writer.add_eos_token_id(5)
    stored = {**dict(own), **extra}
    if fuse_experts:
        stored = gguf_mixtures.fused(stored)
    for name, numbers in (fused(stored) if fuse_qkv else stored).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def architecture_of(config: Any) -> str:
    """Return what the file of a model calls itself."""
    if config.model_type in gguf_mambas.ARCHITECTURES:
        return gguf_mambas.architecture_of(config)
    return ARCHITECTURES.get(config.model_type, config.model_type)


def fused(stored: Mapping[str, Floats]) -> dict[str, Floats]:
    """Join the rows of queries, keys and values."""
    parts = ("attn_q.", "attn_k.", "attn_v.")
    joined = {
        name: numbers for name, numbers in stored.items() if not any(p in name for p in parts)
    }
    for name in stored:
        if "attn_q." in name:
            rows = [stored[name.replace("attn_q.", part)] for part in parts]
            joined[name.replace("attn_q.", "attn_qkv.")] = np.concatenate(rows)
    return joined


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value in the type that it has."""
    adders: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def metadata(config: Any, architecture: str) -> Iterator[tuple[str, Any]]:
    """Return the keys of an architecture."""
    yield "context_length", config.max_position_embeddings
    yield "embedding_length", config.hidden_size
    yield "block_count", config.num_hidden_layers
    yield "feed_forward_length", config.intermediate_size
    yield "attention.head_count", config.num_attention_heads
    if architecture != "gptneox":
        yield "attention.head_count_kv", config.num_key_value_heads
    yield "vocab_size", config.vocab_size
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        yield "attention.key_length", head_dim
        yield "attention.value_length", head_dim
    for name, key in FIELDS.items():
        if name == "norm_eps" and architecture == "nemotron":
            continue  # of LayerNorms
        if (value := getattr(config, name, None)) is not None:
            yield key, float(value)
    if architecture in WINDOWED and (size := getattr(config, "sliding_window", None)) is not None:
        yield "attention.sliding_window", size
        if architecture in LISTED:
            slides = [kind == "sliding_attention" for kind in config.layer_types]
            yield "attention.sliding_window_pattern", slides
    if architecture == "stablelm":
        yield "use_parallel_residual", config.use_parallel_residual
    yield from gguf_mixtures.metadata(config, architecture)
    yield from gguf_hybrids.metadata(config, architecture)
    yield from gguf_latents.metadata(config, architecture)
    yield from gguf_ungated.metadata(config, architecture)
    yield from rope(config, head_dim)


def rope(config: Any, head_dim: int) -> Iterator[tuple[str, Any]]:
    """Return the keys of RoPE."""
    tables = getattr(config, "rope_parameters", None)
    if tables is None:  # Kimi
        return
    params = tables.get("full_attention", tables)
    yield "rope.freq_base", float(params["rope_theta"])
    if "sliding_attention" in tables:
        yield "rope.freq_base_swa", float(tables["sliding_attention"]["rope_theta"])
    if (share := params.get("partial_rotary_factor", 1.0)) != 1:
        yield "rope.dimension_count", int(head_dim * share)
    if params["rope_type"] in ("linear", "yarn"):
        yield "rope.scaling.type", params["rope_type"]
        yield "rope.scaling.factor", float(params["factor"])
    if (length := params.get("original_max_position_embeddings")) and "factor" in params:
        yield "rope.scaling.original_context_length", length
    if "llama_4_scaling_beta" in params:
        yield "rope.scaling.yarn_log_multiplier", float(params["mscale_all_dim"])
        yield "attention.temperature_scale", float(params["llama_4_scaling_beta"])
    if params["rope_type"] == "longrope":
        factor = config.max_position_embeddings / length
        yield "rope.scaling.original_context_length", length
        yield "rope.scaling.attn_factor", float((1 + np.log(factor) / np.log(length)) ** 0.5)


def tensors(model: Any, architecture: str) -> Iterator[tuple[str, Floats]]:
    """Return the tensors under the names of the file."""
    config, state = model.config, model.state_dict()
    has_post_norms = any("post_feedforward" in name or "post_self_attn" in name for name in state)
    names = NAMES | POST_NORMS if has_post_norms or architecture == "seed_oss" else NAMES
    if architecture == "glm4":  # its "post_attention" comes after "post_self_attn"
        names = names | {"post_attention_layernorm": "ffn_norm"}
    if architecture in gguf_mixtures.POST_NORMS | gguf_hybrids.DELTA_NETS:
        names = names | {"post_attention_layernorm": "post_attention_norm"}
    parts = (
        part
        for name, parameter in state.items()
        for own in gguf_hybrids.delta_tensors(config, architecture, name, parameter.numpy())
        for split in gguf_mixtures.tensors(*own, architecture)
        for part in gguf_latents.tensors(*split, config)
    )
    for name, numbers in parts:
        is_tied = name == "lm_head.weight" and config.tie_word_embeddings
        if is_tied or ".act_fn." in name:  # which are keys
            continue
        if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            numbers = permuted(numbers, heads)
        numbers = gguf_ungated.converted(name, numbers, config.num_attention_heads)
        if architecture in ONE_PLUS and name.endswith("norm.weight"):
            numbers = numbers + 1
        for theirs, ggufs in names.items():
            name = name.replace(theirs, ggufs)
        yield name, numbers
    yield from rope_divisors(model)


def rope_divisors(model: Any) -> Iterator[tuple[str, Floats]]:
    """Return what divides the frequencies of RoPE: LongRoPE's factors, or Llama 3's scaling."""
    params = getattr(model.config, "rope_parameters", None) or {}
    for length in ("long", "short"):
        if factors := params.get(f"{length}_factor"):
            yield f"rope_factors_{length}.weight", np.array(factors, np.float32)
    if params.get("rope_type") == "llama3":
        scaled = model.model.rotary_emb.inv_freq.numpy()
        plain = params["rope_theta"] ** -(np.arange(len(scaled)) / len(scaled))
        yield "rope_freqs.weight", (plain / scaled).astype(np.float32)
