"""GGUF metadata, lowered to a `DecoderSpec`.

A GGUF file describes its model by llama.cpp's keys, `{architecture}.{key}`, and leaves some of it
to be seen from which tensors there are. `lower_gguf` translates that into the `config.json` of the
same family, which `lowering` lowers. `gguf_architectures.py` has the rest.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.models.families.dense import FULL, SLIDING
from headrace.engine_proc.worker.models.families.hybrids import CONV, LINEAR
from headrace.engine_proc.worker.models.families.mamba import MAMBA, MLP, MOE
from headrace.engine_proc.worker.models.gguf_architectures import (
    ARCHITECTURES,
    DEEPSEEK_V3,
    MAMBA2,
    MIXTURES,
    NEMOTRON_MAMBA2,
    SIGMOID,
    TEMPERATURE,
    Architecture,
)
from headrace.engine_proc.worker.models.lowering import lower_fields
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    Mixer,
    Norm,
    RopeTable,
)
from headrace.errors import ModelError
from headrace.model.gguf_metadata import LONG_ROPE, trained_length

NEWER_GEMMAS = ("gemma3n_text", "gemma4_text")
STORED_NORMS = {Norm.RMS_ONE_PLUS: Norm.RMS, Norm.LAYER_ONE_PLUS: Norm.LAYER}  # as 1 + w
KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
}
# What errors call the fields that several keys, or one of another form, make.
MADE_FIELDS = {
    "head_dim": "attention.key_length",
    "layer_types": "attention.sliding_window_pattern",
    "rope_parameters": "rope.freq_base_swa",
    "rope_scaling": "rope.scaling",
    "rope_theta": "rope.freq_base",
}
INERT = frozenset(
    {
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "tensor_data_layout",
        "vocab_size",  # the embedding is what tells, padding included
        # Of Granite 4's dense models, which are converted as mixtures with states are.
        "expert_shared_feed_forward_length",
        "ssm.conv_kernel",
        "ssm.group_count",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
    }
)
YARN = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
EXPERTS_OF_MAVERICK = 128  # which does not normalize queries and keys; all else of Llama 4 does
# Layers of those Gemmas whose scores are scaled by hidden_size / heads rather than by head_dim.
LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}


def lower_gguf(metadata: Mapping[str, Any], tensors: Weights) -> DecoderSpec:
    """Lower a GGUF file.

    Args:
        tensors: under the file's own names.
    Raises:
        ModelError: an unknown architecture, or a known one with a key that is not supported.
    """
    name, architecture = architecture_of(metadata)
    if "token_embd.weight" not in tensors:
        raise ModelError("tensor 'token_embd.weight' is missing")
    prefix = f"{name}."
    values = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
    fields = ConfigFields(values, f"a GGUF {name} model")
    config = config_of(fields, architecture, tensors)
    keys = {ours: key for key, ours in {**KEYS, **architecture.keys}.items()} | MADE_FIELDS
    spec = lower_fields(ConfigFields(config, fields.owner, keys))
    ropes = ropes_of(fields, spec, tensors)
    if architecture.permuted:
        ropes = tuple(replace(rope, interleaved=True) for rope in ropes)
    fields.refuse_unread(INERT)
    return replace(
        tiled(spec) if architecture.is_tiled else spec,
        architecture=name,
        max_position=min(spec.max_position, trained_length(metadata, tensors) or spec.max_position),
        ropes=ropes,
        norm=STORED_NORMS.get(spec.norm, spec.norm),
        qkv_bias=bool(tensors.keys() & {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}),
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        head_bias="output.bias" in tensors,
    )


def tiled(spec: DecoderSpec) -> DecoderSpec:
    """Return the decoder with the value heads of its delta nets in llama.cpp's order."""

    def tile(mixer: Mixer | None) -> Mixer | None:
        if not isinstance(mixer, GatedDeltaNetSpec) or mixer.num_key_heads == mixer.num_value_heads:
            return mixer
        return replace(mixer, is_tiled=True)

    layers = tuple(replace(layer, mixer=tile(layer.mixer)) for layer in spec.layers)
    return replace(spec, layers=layers)


def architecture_of(metadata: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Return the architecture and its name."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError(f"general.architecture is {name!r}, not a string")
    num_experts = metadata.get(f"{name}.expert_count")
    known = MIXTURES if num_experts else ARCHITECTURES
    if name == "deepseek2" and metadata.get(f"{name}.expert_gating_func") == SIGMOID:
        return name, DEEPSEEK_V3
    if name == "mistral3" and metadata.get(f"{name}.{TEMPERATURE}"):
        return name, replace(known[name], family="ministral3")
    if name in known:
        return name, known[name]
    experts = " with experts" if num_experts else ""
    raise ModelError(
        f"architecture {name!r}{experts} is not supported in GGUF; "
        f"supported{experts} are {', '.join(known)}"
    )


def config_of(fields: ConfigFields, architecture: Architecture, tensors: Weights) -> dict[str, Any]:
    """Return the `config.json` of the model."""
    config = {
        "model_type": architecture.family,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        **architecture.constants,
    }
    for key, name in {**KEYS, **architecture.keys}.items():
        value = fields.get(key, None)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # the same for all layers
        if value or value is False:
            config[name] = value
    num_layers = config["num_hidden_layers"] = num_layers_of(fields, tensors)
    if fields.get("expert_gating_func", 0) not in (0, architecture.gating):
        raise fields.wrong("expert_gating_func", f"{architecture.gating}")
    config |= family_config(fields, architecture, tensors, num_layers)
    if architecture.slides and "sliding_window" in config:
        config["layer_types"] = layer_types(fields, num_layers)
    elif architecture.slides:
        config["layer_types"] = [FULL] * num_layers
    rope = rope_config(fields, architecture)
    if architecture.family == "gemma4_text":
        return config | gemma4_config(fields, tensors, config, rope)
    if architecture.has_latents:
        return config | latent_config(fields, architecture) | rope
    head_dim = head_dim_of(fields, tensors)
    return config | head_config(fields, architecture, head_dim) | rope


def family_config(
    fields: ConfigFields, architecture: Architecture, tensors: Weights, num_layers: int
) -> dict[str, Any]:
    """Return what some families' files say by their tensors, or in a form of their own."""
    config: dict[str, Any] = {}
    if architecture.has_convs:
        config |= attention_config(fields, num_layers, CONV)
    if architecture.has_mamba2:
        config |= mamba2_config(fields, architecture.family, tensors, num_layers)
    if architecture.has_mamba:
        config |= mamba_config(fields, tensors, num_layers)
    if architecture.family in NEWER_GEMMAS:
        config |= newer_gemma_config(fields, tensors)
    if architecture.keys.get("ssm.time_step_rank") == "linear_num_value_heads":
        config["linear_value_head_dim"] = multiple(fields, "ssm.inner_size", "ssm.time_step_rank")
    if architecture.family == "kimi_linear":
        config |= attention_config(fields, num_layers, LINEAR)
        config["linear_num_heads"] = fields.integer("attention.head_count")
    return config | routing_config(fields, architecture.family, tensors)


def routing_config(fields: ConfigFields, family: str, tensors: Weights) -> dict[str, Any]:
    """Return what files with experts say by their tensors, or by the number of experts."""
    config: dict[str, Any] = {}
    if family == "lfm2_moe":
        config["use_expert_bias"] = any(name.endswith("exp_probs_b.bias") for name in tensors)
    if family == "glm4_moe":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    if family == "llama4_text":
        config["use_qk_norm"] = fields.get("expert_count") != EXPERTS_OF_MAVERICK
        if fields.get("attention.sliding_window", None) is not None:
            raise fields.wrong("attention.sliding_window", "absent: chunks have 8192 tokens")
    return config


def newer_gemma_config(fields: ConfigFields, tensors: Weights) -> dict[str, Any]:
    """Return what Gemma 3n and 4 have of embeddings per layer, of residuals and of gates."""
    config: dict[str, Any] = {
        "hidden_size_per_layer_input": fields.get("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": fields.get("attention.shared_kv_layers", 0),
    }
    if "per_layer_token_embd.weight" in tensors:
        rows = tensors["per_layer_token_embd.weight"].shape[0]
        config["vocab_size_per_layer_input"] = rows
    if "blk.0.laurel_l.weight" in tensors:
        config["laurel_rank"] = tensors["blk.0.laurel_l.weight"].shape[0]
    cuts = fields.get("activation_sparsity_scale", None)  # minus infinity: none
    if cuts is not None:
        if not isinstance(cuts, list) or not all(isinstance(cut, float) for cut in cuts):
            raise fields.wrong("activation_sparsity_scale", "a list of numbers")
        config["activation_sparsity_pattern"] = [NormalDist().cdf(cut) for cut in cuts]
    return config


def gemma4_config(
    fields: ConfigFields, tensors: Weights, config: Mapping[str, Any], rope: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the heads of full layers, of sliding ones, the RoPE of both, and the sizes of MLPs.

    Divisors of frequencies say which pairs of full layers rotate.
    """
    types = config.get("layer_types") or []
    full = next((i for i, kind in enumerate(types) if kind == FULL), 0)
    for kind in ("", "_swa"):
        length = fields.integer(f"attention.key_length{kind}")
        if fields.integer(f"attention.value_length{kind}", length) != length:
            raise fields.wrong(f"attention.value_length{kind}", f"{length}, the length of a key")
    own: dict[str, Any] = {
        "head_dim": fields.integer("attention.key_length_swa"),
        "global_head_dim": fields.integer("attention.key_length"),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "rope_parameters": {
            FULL: {"rope_theta": rope["rope_theta"]},
            SLIDING: rope.get("rope_parameters", {}).get(SLIDING, {}),
        },
    }
    if is_list(fields, "attention.head_count_kv"):
        counts = fields.one_per_layer("attention.head_count_kv", len(types)) or []
        sliding = [count for count, kind in zip(counts, types, strict=True) if kind == SLIDING]
        own |= {"num_key_value_heads": sliding[0], "num_global_key_value_heads": counts[full]}
    if is_list(fields, "feed_forward_length"):
        sizes = fields.get("feed_forward_length")
        own |= {"intermediate_size": sizes[0], "use_double_wide_mlp": sizes[-1] != sizes[0]}
    return own


def is_list(fields: ConfigFields, key: str) -> bool:
    """Whether a key has a value for each layer, and they differ."""
    value = fields.get(key, None)
    return isinstance(value, list) and len(set(value)) > 1


def latent_config(fields: ConfigFields, architecture: Architecture) -> dict[str, Any]:
    """Return the sizes of heads that are products of a latent.

    Newer files have one KV head, of the latent; older ones those that are made of it.
    """
    fields.get("attention.head_count_kv", None)
    lengths = [fields.integer(f"attention.{of}_length") for of in ("key", "value")]
    key, value = (
        fields.integer(f"attention.{of}_length_mla", length)
        for of, length in zip(("key", "value"), lengths, strict=True)
    )
    rotated = fields.integer("rope.dimension_count")
    if key <= rotated:
        raise fields.wrong("rope.dimension_count", f"less than the {key} numbers of a key")
    config: dict[str, Any] = {"qk_nope_head_dim": key - rotated, "v_head_dim": value}
    if architecture.family == "deepseek_v2" and fields.get("expert_group_count", 1) != 1:
        config["topk_method"] = "group_limited_greedy"
    if architecture.family == "youtu":  # what files repeat without experts
        for name in ("leading_dense_block_count", "expert_feed_forward_length"):
            fields.get(name, None)
        if fields.get("expert_shared_count", 0) != 0:
            raise fields.wrong("expert_shared_count", "0 in a model without experts")
    return config


def attention_config(fields: ConfigFields, num_layers: int, other: str) -> dict[str, Any]:
    """Return which layers attend, those with KV heads, and how many KV heads they have."""
    counts = fields.one_per_layer("attention.head_count_kv", num_layers) or []
    kinds = {count for count in counts if count}
    if len(kinds) != 1:
        raise fields.wrong("attention.head_count_kv", "a list of one number and of zeros")
    layer_types = [FULL if count else other for count in counts]
    return {"num_key_value_heads": kinds.pop(), "layer_types": layer_types}


def mamba2_config(
    fields: ConfigFields, family: str, tensors: Weights, num_layers: int
) -> dict[str, Any]:
    """Return the fields of Mamba-2, under the names of the family."""
    inner_size, num_heads = fields.integer("ssm.inner_size"), fields.integer("ssm.time_step_rank")
    if inner_size % num_heads:
        raise fields.wrong("ssm.time_step_rank", f"a divisor of {inner_size}")
    names = MAMBA2 | (NEMOTRON_MAMBA2 if family == "nemotron_h" else {})
    config = {
        names["heads"]: num_heads,
        names["head_dim"]: inner_size // num_heads,
        names["conv_bias"]: any(name.endswith("ssm_conv1d.bias") for name in tensors),
        **{names[key]: fields.integer(key) for key in MAMBA2 if key.startswith("ssm.")},
    }
    if family == "falcon_h1":
        has_norm = "blk.0.ssm_norm.weight" in tensors
        return config | {"mamba_d_ssm": inner_size, "mamba_rms_norm": has_norm}
    config |= attention_config(fields, num_layers, MAMBA)
    if family == "granitemoehybrid":
        return config | granite_config(fields)
    return config | nemotron_config(fields, num_layers)


def mamba_config(fields: ConfigFields, tensors: Weights, num_layers: int) -> dict[str, Any]:
    """Return what a file says of Jamba by its tensors, and how often a layer is of which kind."""
    attention = attention_config(fields, num_layers, MAMBA)
    attends = [i for i, kind in enumerate(attention["layer_types"]) if kind == FULL]
    experts = [i for i in range(num_layers) if f"blk.{i}.ffn_gate_inp.weight" in tensors]
    return {
        **attention,
        "mamba_expand": multiple(fields, "ssm.inner_size", "embedding_length"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in tensors),
        **periods(fields, "attention.head_count_kv", "attn", attends, num_layers),
        **periods(fields, "expert_count", "expert", experts, num_layers),
    }


def periods(
    fields: ConfigFields, key: str, kind: str, layers: list[int], num_layers: int
) -> dict[str, Any]:
    """Return the period of layers of a kind and the first of them, as Jamba's configs do."""
    first, second = [*layers, *[num_layers] * 2][:2]
    period = max(second - first, first + 1)
    if layers != list(range(first, num_layers, period)):
        raise fields.wrong(key, f"of layers as far from each other, not those of {layers}")
    return {f"{kind}_layer_offset": first, f"{kind}_layer_period": period}


def granite_config(fields: ConfigFields) -> dict[str, Any]:
    """Return the rest of what Granite 4 has in a form of its own. Bamba's files are like it."""
    if fields.get("rope.scaling.finetuned", None) is not False:
        raise fields.wrong("rope.scaling.finetuned", "false: layers without RoPE, unlike Bamba's")
    size = fields.integer("expert_shared_feed_forward_length", fields.get("feed_forward_length"))
    return {
        "mamba_expand": multiple(fields, "ssm.inner_size", "embedding_length"),
        "position_embedding_type": "nope",
        "shared_intermediate_size": size,
    }


def multiple(fields: ConfigFields, key: str, of: str) -> int:
    """Return how often a number is another one."""
    number, unit = fields.integer(key), fields.integer(of)
    if number % unit:
        raise fields.wrong(key, f"a multiple of {unit}")
    return number // unit


def nemotron_config(fields: ConfigFields, num_layers: int) -> dict[str, Any]:
    """Return what each layer is: with a size of an MLP, that; with KV heads, attention."""
    layer_types = attention_config(fields, num_layers, MAMBA)["layer_types"]
    sizes = fields.one_per_layer("feed_forward_length", num_layers) or []
    kinds = {size for size in sizes if size}
    if len(kinds) > 1 or not all(isinstance(size, int) for size in sizes):
        raise fields.wrong("feed_forward_length", "a list of one number and of zeros")
    mlp = MOE if fields.get("expert_count", 0) else MLP
    types = [mlp if size else kind for kind, size in zip(layer_types, sizes, strict=True)]
    return {"layer_types": types, "intermediate_size": kinds.pop() if kinds else 1}


def num_layers_of(fields: ConfigFields, tensors: Weights) -> int:
    """Return the number of layers without those that predict further tokens."""
    num_layers, num_more = fields.integer("block_count"), fields.get("nextn_predict_layers", 0)
    if num_layers > len(tensors):
        raise fields.wrong("block_count", f"a number of layers that {len(tensors)} tensors make")
    if not isinstance(num_more, int) or not 0 <= num_more < num_layers:
        raise fields.wrong("nextn_predict_layers", f"a number of the {num_layers} layers")
    return num_layers - num_more


def head_dim_of(fields: ConfigFields, tensors: Weights) -> int:
    """Return the width of heads, which is that of the tensors, too: a wrong one may be huge."""
    num_heads = fields.integer("attention.head_count")
    head_dim = fields.integer(
        "attention.key_length", fields.integer("embedding_length") // num_heads
    )
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.wrong("attention.value_length", f"{head_dim}, the length of a key")
    outputs = (name for name in tensors if name.endswith(".attn_output.weight"))
    name = next(outputs, "blk.0.attn_output.weight")
    if name not in tensors:
        raise ModelError(f"tensor {name!r} is missing")
    if tensors[name].shape[-1] != num_heads * head_dim:
        raise ModelError(
            f"tensor {name!r} has {tensors[name].shape[-1]} columns, "
            f"but {num_heads} heads of {head_dim} have {num_heads * head_dim}"
        )
    return head_dim


def head_config(fields: ConfigFields, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Return the width of heads, and what follows from it in some families."""
    config: dict[str, Any] = {"head_dim": head_dim}
    if architecture.family in LAYERS_OF_27B:
        is_27b = fields.get("block_count") == LAYERS_OF_27B[architecture.family]
        width = fields.integer("embedding_length") // fields.integer("attention.head_count")
        config["query_pre_attn_scalar"] = width if is_27b else head_dim
    if "attention.scale" in architecture.keys:
        config["attention_multiplier"] = fields.get("attention.scale", 0) or head_dim**-0.5
        is_rotated = fields.get("rope.scaling.finetuned", True) is not False
        if not is_rotated and not architecture.has_mamba2:
            raise fields.wrong("rope.scaling.finetuned", "true: Granite without RoPE")
    if architecture.is_partial:  # half of one more: the share is cut to a whole number
        dims = fields.integer("rope.dimension_count", head_dim)
        config["partial_rotary_factor"] = (min(dims, head_dim) + 0.5) / head_dim
    return config


def layer_types(fields: ConfigFields, num_layers: int) -> list[str] | None:
    """Return which layers slide; None is the family's own pattern."""
    pattern = fields.get("attention.sliding_window_pattern", None)
    if pattern is None:
        return None
    if isinstance(pattern, int):  # one layer in so many is full
        pattern = fields.integer("attention.sliding_window_pattern")
        pattern = [i % pattern < pattern - 1 for i in range(num_layers)]
    elif not isinstance(pattern, list) or len(pattern) < num_layers:
        raise fields.wrong("attention.sliding_window_pattern", f"a list of {num_layers}")
    return [SLIDING if slides else FULL for slides in pattern[:num_layers]]


def rope_config(fields: ConfigFields, architecture: Architecture) -> dict[str, Any]:
    """Return the fields of RoPE. Scaling is of full layers, where a file has two kinds."""
    config: dict[str, Any] = {"rope_theta": fields.number("rope.freq_base", 10_000.0)}
    kinds = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "default"}
    kind = fields.choice("rope.scaling.type", kinds, "linear")
    factor = fields.number("rope.scaling.factor", fields.get("rope.scale_linear", 1.0)) or 1.0
    scaling = yarn_config(fields, architecture.yarn) if kind == "yarn" else {}
    if kind == "yarn" or (kind == "linear" and factor != 1):
        scaling |= {"rope_type": kind, "factor": factor}
    sections = fields.one_per_layer("rope.dimension_sections", 3)  # M-RoPE; a fourth is 0
    if sections is not None:
        if not all(isinstance(count, int) and 0 <= count < 1 << 16 for count in sections):
            raise fields.wrong("rope.dimension_sections", "a list of counts of pairs")
        scaling["mrope_section"] = sections
    if (theta := fields.get("rope.freq_base_swa", None)) is not None:
        config["rope_parameters"] = {SLIDING: {"rope_theta": theta}}
    if architecture.family == "ministral3":  # queries beyond the trained length have temperatures
        fields.integer("rope.scaling.original_context_length")
        scaling["llama_4_scaling_beta"] = fields.number(TEMPERATURE)
    config["rope_scaling"] = scaling or {"rope_type": "default"}  # gpt-oss's own default is YaRN
    return config


def yarn_config(fields: ConfigFields, yarn: Mapping[str, Any]) -> dict[str, Any]:
    """Return YaRN's fields beside its factor; llama.cpp takes `mscale` to be 1.

    Files of deepseek2 have a tenth of `mscale_all_dim`.
    """
    if fields.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise fields.wrong("rope.scaling.yarn_ext_factor", "1")
    length = fields.integer("rope.scaling.original_context_length")
    given = {name: fields.get(key, None) for key, name in YARN.items()}
    if given["mscale_all_dim"] is not None and yarn.get("attention_factor"):  # of deepseek2
        given["mscale_all_dim"] = 10 * fields.number("rope.scaling.yarn_log_multiplier")
    return {"original_max_position_embeddings": length, "mscale": 1.0, **given, **yarn}


def ropes_of(fields: ConfigFields, spec: DecoderSpec, tensors: Weights) -> tuple[RopeTable, ...]:
    """Return the tables, the first divided by what the file has for each of its pairs.

    Those are Llama 3's scaling, or LongRoPE's factors of texts within the trained length.
    """
    if not spec.ropes:
        return ()
    rope, *others = spec.ropes
    for name in ("rope_freqs.weight", "rope_factors_short.weight"):
        if name not in tensors:
            continue
        divisors = tensors[name].to_float32()
        if divisors.shape != (len(rope.inv_freq),):
            raise ModelError(
                f"tensor {name!r} has shape {divisors.shape}, not {(len(rope.inv_freq),)}"
            )
        inv_freq = np.array(rope.inv_freq, np.float32) / divisors
        rope = replace(rope, inv_freq=tuple(inv_freq.tolist()))
    if tensors.keys() & {"rope_factors_short.weight", LONG_ROPE}:
        if "rope_factors_short.weight" not in tensors:
            raise ModelError("tensor 'rope_factors_short.weight' is missing")
        fields.integer("rope.scaling.original_context_length")
        rope = replace(rope, scale=rope.scale * fields.number("rope.scaling.attn_factor", 1.0))
    ropes = (rope, *others)
    for i, table in enumerate(ropes):
        dims = 2 * len(table.inv_freq)
        swa = "rope.dimension_count_swa"
        key = swa if i and fields.get(swa, None) is not None else "rope.dimension_count"
        if fields.integer(key, dims if spec.value_norm else spec.head_dim) != dims:
            raise fields.wrong(key, f"{dims}")
    return ropes
