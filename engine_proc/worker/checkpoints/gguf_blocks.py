"""GGUF's block formats, decoded to fp32.

A block is a few scales followed by small integers. Rounding follows ggml: one product, then one
sum, each in fp32, so that results are bitwise those of every other reader.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

CHUNK_NUMBERS = 1 << 16  # decoded at a time: 256 KB of fp32 stay in the L2 cache


class BlockFormat(NamedTuple):
    """`decode` turns [blocks, nbytes] into numbers, written to [blocks, numbers]."""

    numbers: int
    nbytes: int
    decode: Callable[[Bytes, Floats], None]


def decode(format: str, data: Bytes) -> Floats:
    """Decode whole blocks, [bytes] -> [numbers]."""
    block = BLOCK_FORMATS[format]
    blocks = data.reshape(-1, block.nbytes)
    out = np.empty((len(blocks), block.numbers), np.float32)
    step = CHUNK_NUMBERS // block.numbers
    for start in range(0, len(blocks), step):
        block.decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(-1)


def halves(columns: Bytes) -> Floats:
    """Read fp16 scales, [blocks, 2 * n] -> fp32 [blocks, n]."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def nibbles(packed: Bytes, out: Floats) -> None:
    """Unpack [..., n] bytes to [..., 2, n]: all low nibbles come before all high ones."""
    np.bitwise_and(packed, 15, out=out[..., 0, :], casting="unsafe")
    np.right_shift(packed, 4, out=out[..., 1, :], casting="unsafe")


def decode_q4_0(blocks: Bytes, out: Floats) -> None:
    """d * (q - 8): d fp16, 32 nibbles."""
    nibbles(blocks[:, 2:], out.reshape(-1, 2, 16))
    out -= 8
    out *= halves(blocks[:, :2])


def decode_q4_1(blocks: Bytes, out: Floats) -> None:
    """d * q + m: d and m fp16, 32 nibbles."""
    nibbles(blocks[:, 4:], out.reshape(-1, 2, 16))
    out *= halves(blocks[:, :2])
    out += halves(blocks[:, 2:4])


def fifth_bits(packed: Bytes, out: Floats) -> None:
    """Add 16 where a bit is set: of [blocks, 4] bytes to [blocks, 32]."""
    out += np.unpackbits(packed, axis=1, bitorder="little") << 4


def decode_q5_0(blocks: Bytes, out: Floats) -> None:
    """d * (q - 16): d fp16, the high bits of 32 q, their nibbles."""
    nibbles(blocks[:, 6:], out.reshape(-1, 2, 16))
    fifth_bits(blocks[:, 2:6], out)
    out -= 16
    out *= halves(blocks[:, :2])


def decode_q8_0(blocks: Bytes, out: Floats) -> None:
    """d * q: d fp16, 32 int8."""
    np.multiply(blocks[:, 2:].view(np.int8), halves(blocks[:, :2]), out=out)


def encode_q8_0(numbers: Floats) -> Bytes:
    """Round to blocks of Q8_0, [blocks, 34]: the largest number of a block becomes 127 or -127."""
    groups = numbers.reshape(-1, 32)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    scales = np.minimum(largest / 127, np.finfo(np.float16).max).astype("<f2")
    inverse = np.zeros_like(largest)
    np.divide(1, scales.astype(np.float32), out=inverse, where=scales != 0)
    steps = np.rint(groups * inverse).clip(-127, 127).astype(np.int8)
    return np.hstack([scales.view(np.uint8), steps.view(np.uint8)])


def decode_q4_k(blocks: Bytes, out: Floats) -> None:
    """d * s * q - dmin * m: d and dmin fp16, 8 pairs (s, m) of 6 bits, 8 groups of 32 nibbles."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    low_s, low_m, high = packed[:, 0], packed[:, 1], packed[:, 2]
    # Pairs 4 to 7 have their low 4 bits in `high`, their top 2 bits above pairs 0 to 3.
    scales = np.hstack([low_s & 63, (high & 15) | (low_s >> 6 << 4)])
    mins = np.hstack([low_m & 63, (high >> 4) | (low_m >> 6 << 4)])
    groups = out.reshape(-1, 8, 32)
    nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))
    groups *= (halves(blocks[:, :2]) * scales)[:, :, None]
    groups -= (halves(blocks[:, 2:4]) * mins)[:, :, None]


def decode_q6_k(blocks: Bytes, out: Floats) -> None:
    """d * s * (q - 32): 256 q of 4 low and 2 high bits, 16 int8 s for 16 numbers each, d fp16."""
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    quarters = out.reshape(-1, 2, 4, 32)  # each half of a block is four runs of 32
    for i in range(4):
        four = low[:, :, i % 2] & 15 if i < 2 else low[:, :, i % 2] >> 4
        quarters[:, :, i] = four | ((high >> (2 * i) & 3) << 4)
    out -= 32
    scales = blocks[:, 192:208].view(np.int8) * halves(blocks[:, 208:])
    groups = out.reshape(-1, 16, 16)
    groups *= scales[:, :, None]


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18, decode_q4_0),
    "Q4_1": BlockFormat(32, 20, decode_q4_1),
    "Q5_0": BlockFormat(32, 22, decode_q5_0),
    "Q8_0": BlockFormat(32, 34, decode_q8_0),
    "Q4_K": BlockFormat(256, 144, decode_q4_k),
    "Q6_K": BlockFormat(256, 210, decode_q6_k),
}
