"""The layers of a decoder as the C++ core has them."""

from ctypes import POINTER, Structure, c_float, c_int32
from dataclasses import astuple
from typing import Any

from headrace.engine_proc.worker.execution.cpu_mixture import MixtureConfig, mixture_config
from headrace.engine_proc.worker.models.decoder_spec import DecoderSpec, ShortConvSpec

UNLIMITED = 2**31 - 1
ATTENTION, SHORT_CONV = range(2)  # `Mixer` of csrc/cpu/model.h
MAX_CONV_KERNEL = 16  # of csrc/cpu/short_conv.h


class ShortConvConfig(Structure):
    """`ShortConvConfig` of csrc/cpu/model.h."""

    _fields_ = (("channels", c_int32), ("kernel_size", c_int32))


class LayerConfig(Structure):
    """`LayerConfig` of csrc/cpu/model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("rope", "window", "is_chunked")),
        ("temperature_scale", c_float),
        ("temperature_tokens", c_int32),
        ("temperature_offset", c_int32),
        ("mixture", MixtureConfig),
        ("mixer", c_int32),
        ("short_conv", ShortConvConfig),
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


def why_no_mixer(conv: ShortConvSpec) -> str:
    """Return why the core cannot run a mixer; "" if it can."""
    if not 2 <= conv.kernel_size <= MAX_CONV_KERNEL:
        return f"a convolution over {conv.kernel_size} tokens; it can be 2 to {MAX_CONV_KERNEL}"
    return ""


def short_conv(conv: ShortConvSpec) -> tuple[int, ShortConvConfig]:
    """Return a short convolution as the core has it."""
    return SHORT_CONV, ShortConvConfig(conv.channels, conv.kernel_size)


def num_channels_of(spec: DecoderSpec, layer: int) -> int:
    """Return the channels of a layer's convolution."""
    conv = spec.layers[layer].mixer
    assert conv is not None
    return conv.channels


def layer_configs(spec: DecoderSpec) -> tuple[Any, Any]:
    """Return the arrays of `LayerConfig` and `RopeConfig`."""
    layers = (LayerConfig * len(spec.layers))()
    for i, layer in enumerate(spec.layers):
        layers[i] = LayerConfig(
            -1 if layer.rope is None else layer.rope,
            UNLIMITED if layer.window is None else layer.window,
            layer.is_chunked,
            *((0.0, 1, 0) if layer.temperature is None else astuple(layer.temperature)),
            MixtureConfig() if layer.mixture is None else mixture_config(layer.mixture),
            *((ATTENTION, ShortConvConfig()) if layer.mixer is None else short_conv(layer.mixer)),
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
