"""From the hidden states of a SigLIP tower to rows that a decoder takes. Pure."""

from collections.abc import Callable

import numpy as np

from headrace.engine_proc.vision.siglip_patches import PatchSizes
from headrace.engine_proc.vision.siglip_weights import numbers
from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.execution.executor import Floats
from headrace.engine_proc.worker.models.dense_layers import gelu, layer_norm
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields

Connector = Callable[[Floats], Floats]  # of a tile's states, [height, width, hidden]


def in_squares(states: Floats, scale: int) -> Floats:
    """Return squares of so many patches a side, [squares, scale^2 * hidden]."""
    height, width, hidden = states.shape
    lines = states.reshape(height // scale, scale, width // scale, scale * hidden)
    return lines.swapaxes(1, 2).reshape(height * width // scale**2, -1)


def shuffle(fields: ConfigFields, weights: Weights, sizes: PatchSizes, rows: int) -> Connector:
    """Idefics3 and SmolVLM: squares of patches, projected."""
    scale = fields.integer("scale_factor", 2)
    if sizes.side % scale:
        raise fields.wrong("scale_factor", f"a divisor of {sizes.side} patches a side")
    name = "modality_projection.proj.weight"
    matrix = numbers(weights, name, rows, sizes.hidden * scale**2).T

    def project(states: Floats) -> Floats:
        found: Floats = in_squares(states, scale) @ matrix
        return found

    return project


def pool(fields: ConfigFields, weights: Weights, sizes: PatchSizes, rows: int) -> Connector:
    """Gemma 3: the mean of squares of patches, normalized and projected."""
    side = int(fields.integer("mm_tokens_per_image", 256) ** 0.5)
    if sizes.side % side:
        raise fields.wrong("mm_tokens_per_image", f"a square that {sizes.side} patches a side fit")
    matrix = numbers(weights, "mm_input_projection_weight", sizes.hidden, rows)
    norm = 1 + numbers(weights, "mm_soft_emb_norm.weight", sizes.hidden)
    scale = sizes.side // side
    eps = fields.table("vision_config").get("layer_norm_eps", 1e-6)

    def project(states: Floats) -> Floats:
        squares = in_squares(states, scale).reshape(side**2, scale**2, -1)
        means = squares.mean(axis=1)
        size = np.sqrt(np.square(means).mean(axis=1, keepdims=True) + np.float32(eps))
        found: Floats = (means / size * norm) @ matrix
        return found

    return project


def linear(_: ConfigFields, weights: Weights, sizes: PatchSizes, rows: int) -> Connector:
    """PaliGemma: each patch, projected."""
    matrix = numbers(weights, "linear.weight", rows, sizes.hidden).T
    bias = numbers(weights, "linear.bias", rows)

    def project(states: Floats) -> Floats:
        found: Floats = states.reshape(-1, sizes.hidden) @ matrix + bias
        return found

    return project


def perceptron(fields: ConfigFields, weights: Weights, sizes: PatchSizes, rows: int) -> Connector:
    """LFM2-VL: squares of patches, normalized, and two projections with a GELU between them."""
    scale = fields.integer("downsample_factor", 2)
    inner, width = fields.integer("projector_hidden_size", 2560), sizes.hidden * scale**2
    first = numbers(weights, "linear_1.weight", inner, width).T
    last = numbers(weights, "linear_2.weight", rows, inner).T
    biases = [np.zeros(1, np.float32)] * 2
    if fields.flag("projector_bias", True):
        biases = [numbers(weights, f"linear_{i}.bias", size) for i, size in ((1, inner), (2, rows))]
    norm = None
    if fields.flag("projector_use_layernorm", True):
        norm = [numbers(weights, f"layer_norm.{name}", width) for name in ("weight", "bias")]

    def project(states: Floats) -> Floats:
        squares = in_squares(states, scale)
        if norm is not None:
            squares = layer_norm(squares, norm[0], norm[1])
        found: Floats = gelu(squares @ first + biases[0]) @ last + biases[1]
        return found

    return project
