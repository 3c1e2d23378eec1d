"""The layers of a decoder as the C++ core has them."""

from ctypes import POINTER, Structure, c_float, c_int32
from dataclasses import astuple
from typing import Any

import numpy as np

from headrace.engine_proc.worker.execution.cpu_mixture import MixtureConfig, mixture_config
from headrace.engine_proc.worker.execution.executor import Floats
from headrace.engine_proc.worker.execution.held_matrices import LANES, Place
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
    Mixer,
    ShortConvSpec,
)
from headrace.engine_proc.worker.models.weight_shapes import is_one_plus

UNLIMITED = 2**31 - 1
# `Mixer` of csrc/cpu/model.h
ATTENTION, SHORT_CONV, GATED_DELTA_NET, MAMBA2, LATENT_ATTENTION, MAMBA, NO_MIXER = range(7)
CONVOLUTIONS = (".conv", ".conv_x", ".conv_b", ".conv_c")
MAX_CONV_KERNEL = 16  # of csrc/cpu/causal_conv.h
MAX_LATENT_DIM = 1024  # of csrc/cpu/latent_segment.h
MAX_RESIDUALS = 8  # of csrc/cpu/gemma.cpp
LATENT_UNIT = 16  # numbers of a vector, which no two heads share


class ShortConvConfig(Structure):
    """`ShortConvConfig` of csrc/cpu/model.h."""

    _fields_ = (("channels", c_int32), ("kernel_size", c_int32))


class DeltaNetConfig(Structure):
    """`DeltaNetConfig` of csrc/cpu/model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_key_heads", "num_value_heads", "key_dim")),
        *((name, c_int32) for name in ("value_dim", "kernel_size", "is_tiled", "gate_rank")),
    )


class Mamba2Config(Structure):
    """`Mamba2Config` of csrc/cpu/model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_heads", "head_dim", "state_size", "num_groups")),
        *((name, c_int32) for name in ("heads_per_group", "first_head", "kernel_size")),
        *((name, c_int32) for name in ("norm_size", "first_number", "all_numbers")),
        ("norm_before_gate", c_int32),
        *((f"{part}_multiplier", c_float) for part in ("z", "x", "b", "c", "dt")),
    )


class MambaConfig(Structure):
    """`MambaConfig` of csrc/cpu/model.h."""

    _fields_ = tuple((name, c_int32) for name in ("channels", "state_size", "rank", "kernel_size"))


class LatentConfig(Structure):
    """`LatentConfig` of csrc/cpu/model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("query_rank", "rank", "nope_dim", "rope_dim", "value_dim")),
        ("norm_eps", c_float),
    )


class LayerConfig(Structure):
    """`LayerConfig` of csrc/cpu/model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("rope", "window", "is_chunked", "is_two_sided")),
        ("is_causal", c_int32),
        ("temperature_scale", c_float),
        ("temperature_tokens", c_int32),
        ("temperature_offset", c_int32),
        ("mixture", MixtureConfig),
        ("mixer", c_int32),
        ("short_conv", ShortConvConfig),
        ("delta", DeltaNetConfig),
        ("mamba2", Mamba2Config),
        ("mamba", MambaConfig),
        *((name, c_int32) for name in ("attention_beside", "has_mlp")),
        *((name, c_float) for name in ("mixer_multiplier", "attention_multiplier")),
        ("latent", LatentConfig),
        *((name, c_int32) for name in ("num_kv_heads", "head_dim", "intermediate_size")),
        *((name, c_int32) for name in ("kv_layer", "cuts_gates")),
        ("gate_cut", c_float),
    )


class RopeConfig(Structure):
    """`RopeConfig` of csrc/cpu/model.h."""

    _fields_ = (
        ("inv_freq", POINTER(c_float)),
        ("axes", POINTER(c_int32)),
        ("num_pairs", c_int32),
        ("interleaved", c_int32),
        ("scale", c_float),
    )


def why_no_mixer(mixer: Mixer) -> str:
    """Return why the core cannot run a mixer; "" if it can."""
    if isinstance(mixer, LatentAttentionSpec):
        return why_no_latents(mixer)
    if not 2 <= mixer.kernel_size <= MAX_CONV_KERNEL:
        return f"a convolution over {mixer.kernel_size} tokens; it can be 2 to {MAX_CONV_KERNEL}"
    return ""


def number_of(layer: LayerSpec) -> int:
    """Return the `Mixer` of a layer."""
    match layer.mixer:
        case ShortConvSpec():
            return SHORT_CONV
        case GatedDeltaNetSpec():
            return GATED_DELTA_NET
        case Mamba2Spec():
            return MAMBA2
        case MambaSpec():
            return MAMBA
        case LatentAttentionSpec():
            return LATENT_ATTENTION
    return ATTENTION if layer.has_mixer else NO_MIXER


def short_conv(mixer: Mixer | None) -> ShortConvConfig:
    """Return a short convolution as the core has it."""
    if not isinstance(mixer, ShortConvSpec):
        return ShortConvConfig()
    return ShortConvConfig(mixer.channels, mixer.kernel_size)


def delta_net(mixer: Mixer | None) -> DeltaNetConfig:
    """Return a gated delta net as the core has it."""
    return (
        DeltaNetConfig(*astuple(mixer))
        if isinstance(mixer, GatedDeltaNetSpec)
        else DeltaNetConfig()
    )


def mamba2(mixer: Mixer | None) -> Mamba2Config:
    """Return Mamba-2 as the core has it."""
    if not isinstance(mixer, Mamba2Spec):
        return Mamba2Config()
    return Mamba2Config(
        len(mixer.heads),
        mixer.head_dim,
        mixer.state_size,
        len(mixer.groups),
        mixer.heads_per_group,
        mixer.heads.start - mixer.groups.start * mixer.heads_per_group,
        mixer.kernel_size,
        mixer.norm_size,
        mixer.heads.start * mixer.head_dim,
        mixer.num_heads * mixer.head_dim,
        mixer.norm_before_gate,
        *mixer.multipliers,
    )


def mamba(mixer: Mixer | None) -> MambaConfig:
    """Return Mamba as the core has it."""
    if not isinstance(mixer, MambaSpec):
        return MambaConfig()
    return MambaConfig(mixer.channels, mixer.state_size, mixer.rank, mixer.kernel_size)


def numbers_per_channel(spec: DecoderSpec, layer: int, name: str) -> int:
    """Return how many adjacent numbers of a vector are of one channel.

    Args:
        layer: -1 where the vector is of none.
    """
    mixer = spec.layers[layer].mixer if layer >= 0 else None
    if isinstance(mixer, MambaSpec) and name.endswith(".decay"):
        return mixer.state_size
    if mixer is None or isinstance(mixer, LatentAttentionSpec) or not name.endswith(CONVOLUTIONS):
        return 1
    return mixer.kernel_size


def held_vector(spec: DecoderSpec, name: str, place: Place, numbers: Floats) -> Floats:
    """Return the numbers of a vector as the core has them: channels side by side."""
    numbers = np.ascontiguousarray(numbers).ravel()
    if is_one_plus(spec, name):
        numbers = numbers + np.float32(1.0)
    own = numbers_per_channel(spec, place.layer, name)
    if own > 1:
        numbers = np.ascontiguousarray(numbers.reshape(-1, own).T).ravel()
    return np.pad(numbers, (0, -len(numbers) % LANES)) if place.is_expert else numbers


def why_no_latents(latent: LatentAttentionSpec) -> str:
    """Return why the core cannot run a latent attention; "" if it can."""
    if latent.latent_dim > MAX_LATENT_DIM:
        return f"a latent of {latent.latent_dim} numbers; the most is {MAX_LATENT_DIM}"
    for what, size in (
        ("kv_lora_rank", latent.rank),
        ("qk_rope_head_dim", latent.rope_dim),
        ("v_head_dim", latent.value_dim),
    ):
        if size % LATENT_UNIT:
            return f"a {what} of {size}, which is not a multiple of {LATENT_UNIT}"
    return ""


def latent_config(mixer: Mixer | None) -> LatentConfig:
    """Return a latent attention as the core has it."""
    if not isinstance(mixer, LatentAttentionSpec):
        return LatentConfig()
    sizes = (mixer.rank, mixer.nope_dim, mixer.rope_dim, mixer.value_dim)
    return LatentConfig(mixer.query_rank or 0, *sizes, mixer.norm_eps)


def gemma_fields(spec: DecoderSpec) -> dict[str, int]:
    """Return the fields of `Config` that only Gemma 3n and 4 have, of a whole model."""
    per_layer, altup = spec.per_layer, spec.altup
    return {
        "per_layer_size": 0 if per_layer is None else per_layer.size,
        "per_layer_vocab": 0 if per_layer is None else per_layer.vocab_size,
        "num_residuals": 0 if altup is None else altup.num_inputs,
        "laurel_rank": 0 if altup is None else altup.rank,
        "scales_output": altup is not None and altup.scales_output,
    }


def why_no_gemma(spec: DecoderSpec) -> str:
    """Return why the core cannot run these; "" if it can."""
    per_layer, altup = spec.per_layer, spec.altup
    if per_layer is not None and per_layer.size % LANES:
        return f"embeddings of {per_layer.size} numbers per layer, not a multiple of {LANES}"
    if altup is not None and not 2 <= altup.num_inputs <= MAX_RESIDUALS:
        return f"{altup.num_inputs} residuals; there can be 2 to {MAX_RESIDUALS}"
    if altup is not None and spec.hidden_size % LANES:
        return f"several residuals of {spec.hidden_size} numbers, not a multiple of {LANES}"
    return ""


def layer_configs(spec: DecoderSpec) -> tuple[Any, Any]:
    """Return the arrays of `LayerConfig` and `RopeConfig`."""
    layers = (LayerConfig * len(spec.layers))()
    for i, layer in enumerate(spec.layers):
        layers[i] = LayerConfig(
            -1 if layer.rope is None else layer.rope,
            UNLIMITED if layer.window is None else layer.window,
            layer.is_chunked,
            spec.encoder is not None,
            layer.is_causal,
            *((0.0, 1, 0) if layer.temperature is None else astuple(layer.temperature)),
            MixtureConfig() if layer.mixture is None else mixture_config(layer.mixture),
            number_of(layer),
            short_conv(layer.mixer),
            delta_net(layer.mixer),
            mamba2(layer.mixer),
            mamba(layer.mixer),
            layer.attention_beside,
            layer.has_mlp,
            layer.mixer_multiplier,
            layer.attention_multiplier,
            latent_config(layer.mixer),
            *spec.kv_heads_of(layer),
            spec.mlp_size_of(layer),
            -1 if layer.keys_of is None else layer.keys_of,
            layer.gate_cut is not None,
            layer.gate_cut or 0.0,
        )
    ropes = (RopeConfig * max(1, len(spec.ropes)))()
    for i, rope in enumerate(spec.ropes):
        num_pairs = len(rope.inv_freq)
        ropes[i] = RopeConfig(
            (c_float * num_pairs)(*rope.inv_freq),
            (c_int32 * num_pairs)(*rope.axes),  # zeros where there are none
            num_pairs,
            rope.interleaved,
            rope.scale,
        )
    return layers, ropes
