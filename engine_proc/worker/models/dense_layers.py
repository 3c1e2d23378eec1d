"""The layers behind the pooling of a text: Dense modules, or the head that scores it."""

from collections.abc import Mapping
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints import safetensors
from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.errors import ModelError
from headrace.model.pooling import DenseActivation, Pooling
from headrace.native_core import load_core

Floats = npt.NDArray[np.float32]
Tensors = Mapping[str, Weight]
LANES = 16  # numbers that the core's kernels take together


@dataclass(frozen=True)
class DenseLayer:
    """A product with a matrix, its activation, and in some heads a LayerNorm."""

    weight: Floats  # [out, in]
    bias: Floats | None = None  # [out]
    activation: DenseActivation = DenseActivation.IDENTITY
    norm: Floats | None = None  # [out]
    norm_bias: Floats | None = None
    norm_eps: float = 1e-5

    def __call__(self, vector: Floats) -> Floats:
        """Return [out] of [in]. One at a time: a product of several may add in another order."""
        out = self.weight @ vector
        if self.bias is not None:
            out += self.bias
        out = activated(self.activation, out)
        if self.norm is None:
            return out
        return layer_norm(out, self.norm, self.norm_bias, self.norm_eps)


def activated(kind: DenseActivation, x: Floats) -> Floats:
    """Return the activation of each number."""
    match kind:
        case DenseActivation.IDENTITY:
            return x
        case DenseActivation.SIGMOID:
            return sigmoid(x)
        case DenseActivation.TANH:
            return np.tanh(x)
        case DenseActivation.RELU:
            return np.maximum(x, np.float32(0))
        case DenseActivation.SILU:
            return x * sigmoid(x)
        case DenseActivation.GELU:
            return gelu(x)


def gelu(x: Floats) -> Floats:
    """Return x * P(X <= x) of the normal distribution, off by 1.5e-7 |x| at most."""
    compute = load_core().headrace_cpu_gelu
    compute.restype, compute.argtypes = None, (c_void_p, c_int32)
    found = np.zeros(-(-x.size // LANES) * LANES, np.float32)
    found[: x.size] = x.ravel()
    compute(found.ctypes.data, found.size)
    return found[: x.size].reshape(x.shape)


def layer_norm(x: Floats, weight: Floats, bias: Floats | None = None, eps: float = 1e-5) -> Floats:
    """Return rows with a mean of 0 and a variance of 1, times a weight, and a bias."""
    compute = load_core().headrace_cpu_layer_norm
    sizes = (c_int32, c_int32, c_float)
    compute.restype, compute.argtypes = None, (c_void_p, c_void_p, c_void_p, *sizes, c_void_p)
    rows, scale = (np.ascontiguousarray(array, np.float32) for array in (x, weight))
    shift = np.zeros_like(scale) if bias is None else np.ascontiguousarray(bias, np.float32)
    found = np.empty_like(rows)
    num_rows, num_cols = rows.size // scale.size, scale.size
    arrays = (array.ctypes.data for array in (rows, scale, shift))
    compute(*arrays, num_rows, num_cols, eps, found.ctypes.data)
    return found


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + e^-x), without an overflow."""
    numbers: Floats = (np.float32(0.5) * (np.float32(1) + np.tanh(np.float32(0.5) * x))).astype(
        np.float32
    )
    return numbers


class HeadLayer(NamedTuple):
    """The names of a layer of a head."""

    module: str
    activation: DenseActivation = DenseActivation.IDENTITY
    norm: str = ""


# A name may be that of a base model, whose prefix is taken off.
ROBERTA_HEAD = (
    HeadLayer("classifier.dense", DenseActivation.TANH),
    HeadLayer("classifier.out_proj"),
)
HEADS = {
    "bert": (HeadLayer("bert.pooler.dense", DenseActivation.TANH), HeadLayer("classifier")),
    "camembert": ROBERTA_HEAD,
    "roberta": ROBERTA_HEAD,
    "xlm-roberta": ROBERTA_HEAD,
    "distilbert": (HeadLayer("pre_classifier", DenseActivation.RELU), HeadLayer("classifier")),
    "electra": (
        HeadLayer("classifier.dense", DenseActivation.GELU),
        HeadLayer("classifier.out_proj"),
    ),
    "modernbert": (
        HeadLayer("head.dense", DenseActivation.GELU, norm="head.norm"),
        HeadLayer("classifier"),
    ),
}
DECODER_HEAD = (HeadLayer("score"),)


def head_of(config: Mapping[str, Any]) -> tuple[HeadLayer, ...]:
    """Return the layers of a model's classification head.

    Raises:
        ModelError: its activation is not supported.
    """
    kind = config.get("model_type")
    layers = HEADS.get(str(kind), DECODER_HEAD)
    if kind != "modernbert":
        return layers
    name = config.get("classifier_activation", "gelu")
    if name not in tuple(DenseActivation):
        raise ModelError(
            f"classifier_activation {name!r} is not supported; one of "
            f"{', '.join(DenseActivation)} is"
        )
    return (layers[0]._replace(activation=DenseActivation(name)), *layers[1:])


def head_layers(
    config: Mapping[str, Any], tensors: Tensors, activation: DenseActivation
) -> tuple[DenseLayer, ...]:
    """Read the classification head of a model, whose last layer has `activation`.

    Raises:
        ModelError: a tensor is missing, or does not fit the others.
    """
    width = config.get("hidden_size") or config.get("dim")
    layers = []
    for names in head_of(config):
        layer = read_layer(tensors, names.module, width, names.activation)
        if names.norm:
            layer = replace(
                layer,
                norm=numbers_of(tensors, f"{names.norm}.weight", layer.weight.shape[:1]),
                norm_bias=optional_numbers(tensors, f"{names.norm}.bias", layer.weight.shape[:1]),
                norm_eps=config.get("norm_eps", 1e-5),
            )
        layers.append(layer)
        width = len(layer.weight)
    if width != 1:
        raise ModelError(f"a head of {width} labels is not supported; a cross-encoder has one")
    return (*layers[:-1], replace(layers[-1], activation=activation))


def logit_layers(
    spec: DecoderSpec, weights: Tensors, tokens: tuple[int, ...], activation: DenseActivation
) -> tuple[DenseLayer, ...]:
    """Return the score of a decoder: a token's logit, without that of another.

    Logits with a softcap are apart until they have it: c tanh(x / c).

    Raises:
        ModelError: its logits have a bias, or a token is not in its vocabulary.
    """
    if spec.head_bias:
        raise ModelError("a score by the logits of tokens with a bias is not supported")
    if max(tokens) >= spec.vocab_size:
        raise ModelError(
            f"token {max(tokens)} is not one of the {spec.vocab_size} in the vocabulary"
        )
    head = weights["embed" if spec.tied_head else "head"]
    rows: Floats = np.concatenate([head.rows(token, token + 1).to_float32() for token in tokens])
    rows *= np.float32(spec.logit_multiplier)
    signs: Floats = np.array([[1, -1][: len(tokens)]], np.float32)
    if spec.logit_softcap is None:
        return (DenseLayer(signs @ rows, activation=activation),)
    cap = np.float32(spec.logit_softcap)
    return (
        DenseLayer(rows / cap, activation=DenseActivation.TANH),
        DenseLayer(signs * cap, activation=activation),
    )


def without_head(config: Mapping[str, Any], tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the tensors of a model but for those of its classification head."""
    modules = tuple(f"{layer.module}." for layer in head_of(config))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(modules)}


def dense_modules(folder: Path, pooling: Pooling, width: int) -> tuple[DenseLayer, ...]:
    """Read the Dense modules of a folder, the first of which takes `width` numbers.

    Raises:
        ModelError: a file is missing or broken, or a matrix does not fit the others.
    """
    layers = []
    for module in pooling.dense:
        tensors = safetensors.open_folder(folder / module.path)
        layer = read_layer(tensors, "linear", width, module.activation)
        if len(layer.weight) != module.out_features:
            raise ModelError(
                f"{folder / module.path}: 'linear.weight' has {len(layer.weight)} rows, not "
                f"out_features {module.out_features}"
            )
        layers.append(layer)
        width = module.out_features
    return tuple(layers)


def read_layer(
    tensors: Tensors, module: str, width: Any, activation: DenseActivation
) -> DenseLayer:
    """Read a layer of `width` columns, which may have a bias."""
    name = f"{module}.weight"
    rows = tensors[name].shape[0] if name in tensors else 0
    weight = numbers_of(tensors, name, (rows, width))
    return DenseLayer(weight, optional_numbers(tensors, f"{module}.bias", (rows,)), activation)


def optional_numbers(tensors: Tensors, name: str, shape: tuple[int, ...]) -> Floats | None:
    """Return a tensor's numbers, or None where there is no such tensor."""
    return numbers_of(tensors, name, shape) if name in tensors else None


def numbers_of(tensors: Tensors, name: str, shape: tuple[int, ...]) -> Floats:
    """Return a tensor's numbers; ModelError if it is missing or has another shape."""
    if name not in tensors:
        raise ModelError(f"tensor {name!r} is missing")
    if tensors[name].shape != shape:
        found = list(tensors[name].shape)
        raise ModelError(f"tensor {name!r} has shape {found}, not {list(shape)}")
    return np.ascontiguousarray(tensors[name].to_float32())
