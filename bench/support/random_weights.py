"""Random weights of a decoder, in any format: a step costs what it does with trained ones."""

import math

import numpy as np

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weights
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_shapes import Shape, weight_shapes

# Of GGUF's blocks: numbers, bytes, and the fp16 scales by their place, or bytes.
BLOCKS: dict[Format, tuple[int, int, dict[int, float | bytes]]] = {
    Format.Q8_0: (32, 34, {0: 0.0005}),
    Format.Q4_0: (32, 18, {0: 0.005}),
    Format.Q4_1: (32, 20, {0: 0.005, 2: -0.0375}),
    Format.Q5_0: (32, 22, {0: 0.0025}),
    Format.Q5_1: (32, 24, {0: 0.0025, 2: -0.0375}),
    Format.Q2_K: (256, 84, {80: 0.005, 82: 0.005}),
    Format.Q3_K: (256, 110, {108: 0.001}),
    Format.Q4_K: (256, 144, {0: 0.00015, 2: 0.001}),
    Format.Q5_K: (256, 176, {0: 0.00007, 2: 0.001}),
    Format.Q6_K: (256, 210, {208: 0.00003}),
    Format.IQ4_NL: (32, 18, {0: 0.0006}),
    Format.IQ4_XS: (256, 136, {0: 0.00003}),
    Format.MXFP4: (32, 17, {0: bytes([121])}),
}


def random_weights(format: Format, spec: DecoderSpec) -> Weights:
    """Make weights of about the size of trained ones; equal shapes share one.

    Vectors are ones, and rates minus ones: a state must not grow.
    """
    made: dict[Shape, StoredTensor] = {}
    weights: Weights = {}
    for name, shape in weight_shapes(spec).items():
        if shape not in made:
            made[shape] = random_tensor(format, shape)
        weights[name] = made[shape]
        if name.endswith((".rate", ".decay")):
            numbers = np.full(shape, -1, np.float32)
            weights[name] = StoredTensor(Format.F32, shape, numbers.view(np.uint8))
    return weights


def random_tensor(format: Format, shape: Shape) -> StoredTensor:
    """Make one weight."""
    if len(shape) == 1:
        return StoredTensor(Format.F32, shape, np.ones(shape, np.float32).view(np.uint8))
    rng = np.random.default_rng(0)
    count = math.prod(shape)
    if format not in BLOCKS:
        numbers = rng.standard_normal(count, np.float32) * np.float32(0.04)
        halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return StoredTensor(
            format, shape, (numbers if format == Format.F32 else halves).view(np.uint8)
        )
    numbers_of_block, size, scales = BLOCKS[format]
    blocks = rng.integers(0, 256, (count // numbers_of_block, size), np.uint8)
    for place, scale in scales.items():
        stored = scale if isinstance(scale, bytes) else np.array([scale], "<f2").tobytes()
        blocks[:, place : place + len(stored)] = np.frombuffer(stored, np.uint8)
    return StoredTensor(format, shape, blocks.reshape(-1))
