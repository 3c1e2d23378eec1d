"""Mixtures whose experts are held in fewer bits, as checkpoints hold them."""

from collections.abc import Callable

import numpy as np
from random_decoders import random_blocks, random_weights

from headrace.engine_proc.worker.checkpoints.fp8_weight import Fp8Weight
from headrace.engine_proc.worker.checkpoints.int4_packings import WORD_CODES, PackQuantized
from headrace.engine_proc.worker.checkpoints.int4_weight import Int4Weight, PackedMatrix
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight, Weights
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec

Shape = tuple[int, int]
BLOCK = 128  # of fp8, in rows and in columns


def fp8(shape: Shape, block: Shape) -> Fp8Weight:
    """Return codes of e4m3, with a scale for each block."""
    rng = np.random.default_rng(shape)
    exponents = rng.integers(4, 8, shape)  # of numbers from 1/8 to 2
    codes = (rng.integers(0, 2, shape) << 7 | exponents << 3 | rng.integers(0, 8, shape)).astype(
        "u1"
    )
    size = tuple(-(-numbers // of) for numbers, of in zip(shape, block, strict=True))
    scales = rng.uniform(0.05, 0.2, size).astype(np.float32)
    return Fp8Weight(StoredTensor(Format.F8_E4M3, shape, codes.reshape(-1)), scales, block)


def int4(shape: Shape, group_size: int) -> Int4Weight:
    """Return codes as compressed-tensors packs them."""
    rng = np.random.default_rng(shape)
    num_rows, num_columns = shape
    groups = num_columns // group_size
    words = rng.integers(0, 1 << 32, (num_rows, num_columns // WORD_CODES), np.uint32)
    scales = rng.uniform(0.01, 0.05, (num_rows, groups)).astype("<f2")
    packing = PackQuantized(
        StoredTensor(Format.I32, words.shape, words.reshape(-1).view("u1")),
        StoredTensor(Format.F16, scales.shape, scales.reshape(-1).view("u1")),
        None,
    )
    return Int4Weight.of(PackedMatrix(packing, group_size))


FORMATS: dict[str, Callable[[Shape], Weight]] = {
    "fp8 by tensor": lambda shape: fp8(shape, shape),
    "fp8 by row": lambda shape: fp8(shape, (1, shape[1])),
    "fp8 by block": lambda shape: fp8(shape, (BLOCK, BLOCK)),
    "int4": lambda shape: int4(shape, 32),
    "mxfp4": lambda shape: random_blocks(shape, Format.MXFP4),
}


def quantized(spec: DecoderSpec, name: str) -> Weights:
    """Return random weights with experts in one of `FORMATS`."""
    weights = dict(random_weights(spec))
    for of in [of for of in weights if ".experts." in of and not of.endswith(".bias")]:
        num_rows, num_columns = weights[of].shape
        weights[of] = FORMATS[name]((num_rows, num_columns))
    return weights
