"""The layers of a decoder as the C++ core has them."""

from ctypes import POINTER, Structure, c_float, c_int32
from dataclasses import astuple
from typing import Any

from headrace.engine_proc.worker.execution.cpu_mixture import MixtureConfig, mixture_config
from headrace.engine_proc.worker.models.decoder_spec import (
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    MixerSpec,
    ShortConvSpec,
)

UNLIMITED = 2**31 - 1
ATTENTION, SHORT_CONV, LATENT_ATTENTION = range(3)  # `Mixer` of csrc/cpu/model.h
MAX_CONV_KERNEL = 16  # of csrc/cpu/short_conv.h
MAX_LATENT_DIM = 1024  # of csrc/cpu/latent_segment.h
LATENT_UNIT = 16  # numbers of a vector, which no two heads share


class ShortConvConfig(Structure):
    """`ShortConvConfig` of csrc/cpu/model.h."""

    _fields_ = (("channels", c_int32), ("kernel_size", c_int32))


class LatentConfig(Structure):
    """`LatentConfig` of csrc/cpu/model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("query_rank", "rank", "nope_dim", "rope_dim", "value_dim")),
        ("norm_eps", c_float),
    )


class LayerConfig(Structure):
    """`LayerConfig` of csrc/cpu/model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("rope", "window", "is_chunked")),
        ("temperature_scale", c_float),
        ("temperature_tokens", c_int32),
        ("mixture", MixtureConfig),
        ("mixer", c_int32),
        ("short_conv", ShortConvConfig),
        ("latent", LatentConfig),
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


def why_no_mixer(mixer: MixerSpec) -> str:
    """Return why the core cannot run a mixer; "" if it can."""
    if isinstance(mixer, LatentAttentionSpec):
        return why_no_latents(mixer)
    if not 2 <= mixer.kernel_size <= MAX_CONV_KERNEL:
        return f"a convolution over {mixer.kernel_size} tokens; it can be 2 to {MAX_CONV_KERNEL}"
    return ""


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


def mixer_config(layer: LayerSpec) -> tuple[int, ShortConvConfig, LatentConfig]:
    """Return the kind of a layer's mixer, and its fields; those of other kinds are zeros."""
    conv, latent = ShortConvConfig(), LatentConfig()
    match layer.mixer:
        case None:
            return ATTENTION, conv, latent
        case ShortConvSpec() as mixer:
            return SHORT_CONV, ShortConvConfig(mixer.channels, mixer.kernel_size), latent
        case LatentAttentionSpec() as mixer:
            sizes = (mixer.rank, mixer.nope_dim, mixer.rope_dim, mixer.value_dim)
            own = LatentConfig(mixer.query_rank or 0, *sizes, mixer.norm_eps)
            return LATENT_ATTENTION, conv, own


def num_channels_of(spec: DecoderSpec, layer: int) -> int:
    """Return the channels of a layer's convolution."""
    conv = spec.layers[layer].mixer
    assert isinstance(conv, ShortConvSpec)
    return conv.channels


def layer_configs(spec: DecoderSpec) -> tuple[Any, Any]:
    """Return the arrays of `LayerConfig` and `RopeConfig`."""
    layers = (LayerConfig * len(spec.layers))()
    for i, layer in enumerate(spec.layers):
        layers[i] = LayerConfig(
            -1 if layer.rope is None else layer.rope,
            UNLIMITED if layer.window is None else layer.window,
            layer.is_chunked,
            *((0.0, 1) if layer.temperature is None else astuple(layer.temperature)),
            MixtureConfig() if layer.mixture is None else mixture_config(layer.mixture),
            *mixer_config(layer),
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
