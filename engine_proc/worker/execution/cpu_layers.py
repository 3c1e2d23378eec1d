"""The layers of a decoder as the C++ core has them."""

from ctypes import POINTER, Structure, c_float, c_int32
from dataclasses import astuple
from typing import Any

from headrace.engine_proc.worker.execution.cpu_mixture import MixtureConfig, mixture_config
from headrace.engine_proc.worker.models.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    Mixer,
    ShortConvSpec,
)

UNLIMITED = 2**31 - 1
ATTENTION, SHORT_CONV, GATED_DELTA_NET = range(3)  # `Mixer` of csrc/cpu/model.h
MAX_CONV_KERNEL = 16  # of csrc/cpu/short_conv.h


class ShortConvConfig(Structure):
    """`ShortConvConfig` of csrc/cpu/model.h."""

    _fields_ = (("channels", c_int32), ("kernel_size", c_int32))


class DeltaNetConfig(Structure):
    """`DeltaNetConfig` of csrc/cpu/model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_key_heads", "num_value_heads", "key_dim")),
        *((name, c_int32) for name in ("value_dim", "kernel_size", "is_tiled", "gate_rank")),
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
        ("delta", DeltaNetConfig),
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


def why_no_mixer(conv: Mixer) -> str:
    """Return why the core cannot run a mixer; "" if it can."""
    if not 2 <= conv.kernel_size <= MAX_CONV_KERNEL:
        return f"a convolution over {conv.kernel_size} tokens; it can be 2 to {MAX_CONV_KERNEL}"
    return ""


def mixer_configs(mixer: Mixer | None) -> tuple[int, ShortConvConfig, DeltaNetConfig]:
    """Return a layer's mixer as the core has it, and nothing in place of the others."""
    match mixer:
        case ShortConvSpec():
            conv = ShortConvConfig(mixer.channels, mixer.kernel_size)
            return SHORT_CONV, conv, DeltaNetConfig()
        case GatedDeltaNetSpec():
            return GATED_DELTA_NET, ShortConvConfig(), DeltaNetConfig(*astuple(mixer))
        case None:
            return ATTENTION, ShortConvConfig(), DeltaNetConfig()


def kernel_size_of(spec: DecoderSpec, layer: int) -> int:
    """Return the tokens that a layer's convolution sees."""
    mixer = spec.layers[layer].mixer
    assert mixer is not None
    return mixer.kernel_size


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
            *mixer_configs(layer.mixer),
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
