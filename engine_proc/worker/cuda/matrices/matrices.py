"""Weights on the device: matrices in every format, and vectors.

Matrices that take the same rows are one, under a name of its own: `qkv`, `gate_up`. A format is
kept if there is a product for it and all parts of a matrix have it; else they are decoded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine_proc.worker.checkpoints.weights import Weight, Weights
from headrace.engine_proc.worker.cuda.matrices.dense import DenseMatrix
from headrace.engine_proc.worker.cuda.matrices.fp8 import Fp8Matrix
from headrace.engine_proc.worker.cuda.matrices.int4 import Int4Matrix
from headrace.engine_proc.worker.cuda.matrices.upload import to_device
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, QKNorm
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes

FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # matrices that one product takes
FP8 = "fp8"  # what `--quantization` can say here, beside "none"


class Matrix(Protocol):
    """A weight matrix that a layer multiplies with."""

    def apply(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`, [rows, terms] -> [rows, columns]."""
        ...


@dataclass(frozen=True)
class DeviceWeights:
    """A decoder's weights, under our names (see `weights.py`) or those of `FUSED`."""

    matrices: Mapping[str, Matrix]  # with their biases; `head` is there if it is tied, too
    tensors: Mapping[str, Tensor]  # norms and sinks, fp32; `embed`; `qk_norm`, [2, head_dim]


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
    sources = fused(spec)
    for done, (name, parts) in enumerate(sources.items()):
        progress(done, len(sources))
        stored = [weights[part] for part in parts]
        if name == "embed":
            tensors[name] = to_device(stored, device, dtype)
        elif len(stored[0].shape) == 1:
            numbers = to_device(stored, device, torch.float32)
            tensors[name] = numbers.view(2, -1) if name.endswith("qk_norm") else numbers
        else:
            biases = [weights[f"{part}.bias"] for part in parts if f"{part}.bias" in weights]
            bias = to_device(biases, device, dtype) if biases else None
            own = "none" if name == "head" else quantization
            matrices[name] = load_matrix(stored, bias, device, dtype, own)
    if spec.tied_head:
        matrices["head"] = DenseMatrix(tensors["embed"])
    progress(len(sources), len(sources))
    return DeviceWeights(matrices, tensors)


def load_matrix(
    parts: Sequence[Weight],
    bias: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
) -> Matrix:
    """Load a matrix, given its parts, rows after rows."""
    matrix = Int4Matrix.of(parts, bias, device) or Fp8Matrix.of(parts, bias, device)
    if matrix is not None:
        return matrix
    if quantization == FP8:
        return Fp8Matrix.rounded(parts, bias, device)
    return DenseMatrix(to_device(parts, device, dtype), bias)


def fused(spec: DecoderSpec) -> dict[str, Sequence[str]]:
    """Return which weights are loaded as one, by its name; biases come with their matrices."""
    sources: dict[str, Sequence[str]] = {}
    wholes = {part: (whole, parts) for whole, parts in FUSED.items() for part in parts}
    if spec.qk_norm == QKNorm.PER_HEAD:
        wholes |= {part: ("qk_norm", ("q_norm", "k_norm")) for part in ("q_norm", "k_norm")}
    for name in weight_shapes(spec):
        prefix, dot, local = name.rpartition(".")
        if local == "bias":
            continue
        whole, parts = wholes.get(local, (local, (local,)))
        sources[prefix + dot + whole] = [prefix + dot + part for part in parts]
    return sources
