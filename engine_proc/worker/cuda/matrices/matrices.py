"""Weights on the device: matrices in every format, and vectors.

Matrices that take the same rows are one, under a name of its own: `qkv`, `gate_up`, `qkv_a`, `in`.
So are those of all experts of a layer, `experts.gate_up` and `experts.down`. The gate of a shared
MLP is a row of `router`. Convolutions over the same tokens are one, `conv`. A format is kept if
there is a product for it and all parts of a matrix have it; else they are decoded.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.checkpoints.fp8_weight import Fp8Weight
from headrace.engine_proc.worker.checkpoints.int4_weight import Int4Weight
from headrace.engine_proc.worker.checkpoints.weights import Weight, Weights
from headrace.engine_proc.worker.cuda.kernels.gated_activation import xielu_numbers
from headrace.engine_proc.worker.cuda.matrices.dense import DenseMatrix
from headrace.engine_proc.worker.cuda.matrices.experts import experts_of
from headrace.engine_proc.worker.cuda.matrices.fp8 import Fp8Matrix
from headrace.engine_proc.worker.cuda.matrices.int4 import Int4Matrix
from headrace.engine_proc.worker.cuda.matrices.mxfp4 import Mxfp4Matrix
from headrace.engine_proc.worker.cuda.matrices.upload import to_device
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import ExpertFormat, ExpertWeights
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    Mamba2Spec,
    MambaSpec,
    Mixer,
    QKNorm,
    ShortConvSpec,
)
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes

FUSED = {  # matrices that one product takes
    **dict.fromkeys(("q", "k", "v"), "qkv"),
    **dict.fromkeys(("gate", "up"), "gate_up"),
    **dict.fromkeys(("q_a", "kv_a"), "qkv_a"),  # of latent attention
    **dict.fromkeys(("in_z", "in_b", "in_c", "in_x", "in_dt"), "in"),  # of mixers with states
    **dict.fromkeys(("conv_x", "conv_b", "conv_c"), "conv"),
}
OF_DELTA = {  # of a gated delta net whose gates are projections of its input
    **dict.fromkeys("qkvz", "qkvz"),
    **dict.fromkeys("ba", "ba"),
}
OF_MAMBA = {  # dt, B and C are projections of what is convolved
    **dict.fromkeys(("in_x", "in_z"), "in"),
    **dict.fromkeys(("in_dt", "in_b", "in_c"), "low"),
    "conv_x": "conv",
}
XIELU = ".xielu"  # an end of names: four numbers of a layer
ALTUP = ".altup."  # in names: numbers of a layer that make sums of residuals
OF_ALTUP_IN = re.compile(r"altup\.in\.\d+")
OF_EACH_HEAD = (QKNorm.PER_HEAD, QKNorm.PER_HEAD_AFTER_ROPE)
HEAD_MATRICES = ("k_b", "v_b")  # of latent attention: a matrix for each head, as experts have
EMBEDDINGS = ("embed", "per_layer.embed")
OF_LAYER = re.compile(r"layers\.\d+")
OF_EXPERT = re.compile(r"\.experts\.\d+$")
OF_DELTA_CONV = re.compile(r"\.delta\.[qkv]$")
WIDE = (".router", ".delta.ba", ".delta.b", ".delta.a", ".low", ".dt")  # ends of names
EXPERTS = ".experts."  # in names
FP8 = "fp8"  # what `--quantization` can say here, beside "none"

log = logging.getLogger(__name__)


class Matrix(Protocol):
    """A weight matrix that a layer multiplies with."""

    @property
    def bias(self) -> Tensor | None:
        """What is added to each row of products, [columns]."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`, [rows, terms] -> [rows, columns]."""
        ...


@dataclass(frozen=True)
class DeviceWeights:
    """A decoder's weights, under our names (see `weights.py`) or those of `FUSED`."""

    matrices: Mapping[str, Matrix]  # with their biases; `head` is there if it is tied, too
    # Norms, sinks and other vectors, fp32; `embed` and `per_layer.embed`. `qk_norm` is [2,
    # head_dim], twice the same where a layer reads others' keys; `xielu` is [4]. `conv` is
    # [kernel_size, channels]. Matrices of `altup` in layers are in fp32, too.
    tensors: Mapping[str, Tensor]
    # Routers, gates of delta nets, and dt, B and C of Mamba: their products stay fp32.
    wide: Mapping[str, DenseMatrix] = field(default_factory=dict)
    # Of mixtures, and the matrices of heads of latent attention.
    experts: Mapping[str, ExpertWeights] = field(default_factory=dict)


def load_weights(
    spec: DecoderSpec,
    weights: Weights,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str = "none",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DeviceWeights:
    """Load a decoder's weights, or a worker's share of them.

    Args:
        dtype: of what is multiplied.
        quantization: "fp8" rounds the matrices of layers that are held in more bits.
        progress: called with (weights loaded, weights in all).
    """
    matrices: dict[str, Matrix] = {}
    tensors: dict[str, Tensor] = {}
    wide: dict[str, DenseMatrix] = {}
    experts: dict[str, ExpertWeights] = {}
    decoded: list[str] = []
    sources = fused(spec)
    for done, (name, parts) in enumerate(sources.items()):
        progress(done, len(sources))
        stored = [weights[part] for part in parts]
        if name in EMBEDDINGS:
            tensors[name] = to_device(stored, device, dtype)
        elif is_vector(name, stored[0].shape):
            tensors[name] = laid_out(spec, name, to_device(stored, device, torch.float32))
        else:
            biases = [
                weights[own]
                for own in (f"{part}.bias" for part in parts)
                if own in weights and own not in sources
            ]
            bias = to_device(biases, device, dtype) if biases else None
            if name.endswith(WIDE):
                wide[name] = load_wide(stored, bias, device, dtype)
            elif name.endswith(tuple(f".{which}" for which in HEAD_MATRICES)):
                experts[name] = ExpertWeights(to_device(stored, device, dtype))
            elif EXPERTS in name:
                experts[name] = load_experts(stored, bias, device, dtype, quantization)
                if is_decoded(experts[name], stored):
                    decoded.append(name)
            else:
                own = quantization if OF_LAYER.match(name) else "none"
                matrices[name] = load_matrix(stored, bias, device, dtype, own)
    if spec.tied_head:
        bias = tensors.pop("head.bias", None)
        matrices["head"] = DenseMatrix(tensors["embed"], None if bias is None else bias.to(dtype))
    progress(len(sources), len(sources))
    if decoded:
        log.warning(
            "matrices of experts are decoded to %s, since no kernel of GPUs multiplies with what "
            "the files hold: %s%s",
            dtype,
            ", ".join(decoded[:3]),
            ", ..." if decoded[3:] else "",
        )
    return DeviceWeights(matrices, tensors, wide, experts)


def is_vector(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight is held in fp32, and is no matrix of products."""
    return len(shape) == 1 or ALTUP in name


def laid_out(spec: DecoderSpec, name: str, vector: Tensor) -> Tensor:
    """Return a vector as kernels read it."""
    if name.endswith(".qk_norm"):
        head_dim = spec.kv_heads_of(spec.layers[int(name.split(".")[1])])[1]
        return vector.view(-1, head_dim).expand(2, -1).contiguous()
    if name.endswith(".router.norm"):
        return vector * float(spec.hidden_size**-0.5)
    if name.endswith(XIELU):
        return xielu_numbers(vector)
    if not name.endswith(".conv"):
        return vector
    mixer = mixer_of(spec, name)
    assert isinstance(mixer, ShortConvSpec | GatedDeltaNetSpec | Mamba2Spec | MambaSpec)
    taps = vector.view(-1, mixer.kernel_size).T.contiguous()
    if isinstance(mixer, Mamba2Spec):
        sizes = torch.tensor((mixer.inner_size, mixer.group_numbers, mixer.group_numbers))
        taps *= torch.tensor(mixer.multipliers[1:4]).repeat_interleave(sizes).to(taps)
    return taps


def load_wide(
    parts: Sequence[Weight], bias: Tensor | None, device: torch.device, dtype: torch.dtype
) -> DenseMatrix:
    """Load a matrix whose products stay fp32. Its last rows may have no bias, as in routers."""
    weight = to_device(parts, device, dtype)
    return DenseMatrix(weight, None if bias is None else F.pad(bias, (0, len(weight) - len(bias))))


def load_matrix(
    parts: Sequence[Weight],
    bias: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
) -> DenseMatrix | Fp8Matrix | Int4Matrix:
    """Load a matrix, given its parts, rows after rows."""
    matrix = Int4Matrix.of(parts, bias, device) or Fp8Matrix.of(parts, bias, device)
    if matrix is not None:
        return matrix
    if quantization == FP8:
        return Fp8Matrix.rounded(parts, bias, device)
    return DenseMatrix(to_device(parts, device, dtype), bias)


def load_experts(
    parts: Sequence[Weight],
    bias: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
) -> ExpertWeights:
    """Load a matrix of every expert, given their parts, expert by expert."""
    packed = Mxfp4Matrix.of(parts, bias, device)
    if packed is not None:
        return experts_of(packed)
    matrix = load_matrix(parts, bias, device, dtype, quantization)
    if isinstance(matrix, Int4Matrix) and matrix.order is not None:
        matrix = DenseMatrix(to_device(parts, device, dtype), bias)
    return experts_of(matrix)


def is_decoded(experts: ExpertWeights, parts: Sequence[Weight]) -> bool:
    """Whether experts are held in more bits than a file has them in."""
    is_packed = any(isinstance(p, Fp8Weight | Int4Weight) or p.block_numbers > 1 for p in parts)
    return is_packed and experts.format == ExpertFormat.DENSE


def fused(spec: DecoderSpec) -> dict[str, list[str]]:
    """Return which weights are loaded as one, by its name.

    Biases come with their matrices. Those of vectors are vectors of their own, and so are those of
    gates of delta nets.
    """
    sources: dict[str, list[str]] = {}
    shapes = weight_shapes(spec)
    for name in shapes:
        owner = name.removesuffix(".bias")
        if name.endswith(".delta.a.bias"):
            sources[name] = [name]
        elif owner == name or len(shapes.get(owner, ())) < 2:  # that of a tied head has no owner
            whole = whole_of(owner, spec) + name.removeprefix(owner)
            sources.setdefault(whole, []).append(name)
    return sources


def whole_of(name: str, spec: DecoderSpec) -> str:
    """Return the name of what a weight is loaded as a part of."""
    prefix, dot, local = name.rpartition(".")
    if prefix.endswith(XIELU) or OF_ALTUP_IN.fullmatch(name):
        return prefix
    if prefix.endswith((".per_layer", ".altup")):
        return name
    if local in ("q_norm", "k_norm") and spec.qk_norm in OF_EACH_HEAD:
        return prefix + dot + "qk_norm"
    if local == "router":
        prefix = prefix.removesuffix(".shared")
    if prefix.endswith(".delta"):
        mixer = mixer_of(spec, name)
        assert isinstance(mixer, GatedDeltaNetSpec)
        return prefix + dot + (FUSED if mixer.gate_rank else OF_DELTA).get(local, local)
    if OF_LAYER.fullmatch(prefix) and isinstance(mixer_of(spec, name), MambaSpec):
        return prefix + dot + (FUSED | OF_MAMBA).get(local, local)
    prefix = OF_DELTA_CONV.sub(".delta", prefix)
    return OF_EXPERT.sub(".experts", prefix) + dot + FUSED.get(local, local)


def mixer_of(spec: DecoderSpec, name: str) -> Mixer | None:
    """Return the mixer of the layer that a weight is of."""
    return spec.layers[int(name.split(".")[1])].mixer
