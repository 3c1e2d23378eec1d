"""GGUF's block formats, decoded to fp32.

A block is a few scales followed by small integers. Rounding follows ggml: one product, then one
sum, each in fp32, so that results are bitwise those of every other reader.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints import codebook_blocks

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


def decode_q5_1(blocks: Bytes, out: Floats) -> None:
    """d * q + m: d and m fp16, the high bits of 32 q, their nibbles."""
    nibbles(blocks[:, 8:], out.reshape(-1, 2, 16))
    fifth_bits(blocks[:, 4:8], out)
    out *= halves(blocks[:, :2])
    out += halves(blocks[:, 2:4])


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


def encode_q4_0(numbers: Floats) -> Bytes:
    """Round to blocks of Q4_0, [blocks, 18]: the largest number of a block becomes -8 steps."""
    groups = numbers.reshape(-1, 32)
    places = np.abs(groups).argmax(axis=1)[:, None]
    largest = np.take_along_axis(groups, places, axis=1)
    limit = np.finfo(np.float16).max
    scales = np.clip(largest / -8, -limit, limit).astype("<f2")
    inverse = np.zeros_like(largest)
    np.divide(1, scales.astype(np.float32), out=inverse, where=scales != 0)
    steps = np.rint(groups * inverse + 8).clip(0, 15).astype(np.uint8)
    return np.hstack([scales.view(np.uint8), steps[:, :16] | steps[:, 16:] << 4])


def two_bits(packed: Bytes, out: Floats) -> None:
    """Unpack [blocks, 64] bytes to [blocks, 256]: either half is four runs of 32."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    out.reshape(-1, 2, 4, 32)[...] = packed.reshape(-1, 2, 1, 32) >> shifts & 3


def crossed_bits(packed: Bytes) -> Bytes:
    """Unpack [blocks, 32] bytes to [blocks, 8, 32]: each run has one bit of every byte."""
    return np.unpackbits(packed[:, None], axis=1, bitorder="little")


def decode_q2_k(blocks: Bytes, out: Floats) -> None:
    """d * s * q - dmin * m: 16 pairs (s, m) of nibbles, 256 q of 2 bits, d and dmin fp16."""
    two_bits(blocks[:, 16:80], out)
    groups = out.reshape(-1, 16, 16)
    groups *= (halves(blocks[:, 80:82]) * (blocks[:, :16] & 15))[:, :, None]
    groups -= (halves(blocks[:, 82:]) * (blocks[:, :16] >> 4))[:, :, None]


def decode_q3_k(blocks: Bytes, out: Floats) -> None:
    """d * (s - 32) * (q - 4): 256 q of 2 low and a high bit, 16 s of 6 bits, d fp16."""
    two_bits(blocks[:, 32:96], out)
    out.reshape(-1, 8, 32)[...] += crossed_bits(blocks[:, :32]) << 2
    out -= 4
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    tops = [high >> shift & 3 for shift in (0, 2, 4, 6)]
    scales = np.hstack([low & 15, low >> 4]) | np.hstack(tops) << 4
    groups = out.reshape(-1, 16, 16)
    groups *= (halves(blocks[:, 108:]) * (scales.astype(np.int8) - 32))[:, :, None]


def scale_pairs(blocks: Bytes, groups: Floats) -> None:
    """Apply (s, m), of 6 bits, and d and dmin of Q4_K and Q5_K to [blocks, 8, 32] numbers."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    low_s, low_m, high = packed[:, 0], packed[:, 1], packed[:, 2]
    # Pairs 4 to 7 have their low 4 bits in `high`, their top 2 bits above pairs 0 to 3.
    scales = np.hstack([low_s & 63, (high & 15) | (low_s >> 6 << 4)])
    mins = np.hstack([low_m & 63, (high >> 4) | (low_m >> 6 << 4)])
    groups *= (halves(blocks[:, :2]) * scales)[:, :, None]
    groups -= (halves(blocks[:, 2:4]) * mins)[:, :, None]


def decode_q4_k(blocks: Bytes, out: Floats) -> None:
    """d * s * q - dmin * m: d and dmin fp16, 8 pairs (s, m) of 6 bits, 8 groups of 32 nibbles."""
    nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))
    scale_pairs(blocks, out.reshape(-1, 8, 32))


def decode_q5_k(blocks: Bytes, out: Floats) -> None:
    """As Q4_K, with 256 high bits before the nibbles."""
    nibbles(blocks[:, 48:].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))
    groups = out.reshape(-1, 8, 32)
    groups += crossed_bits(blocks[:, 16:48]) << 4
    scale_pairs(blocks, groups)


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


IQ4_NUMBERS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
# Twice the floats of 4 bits, which have one of mantissa.
MXFP4_NUMBERS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def look_up(table: Floats, packed: Bytes, out: Floats) -> None:
    """Do as `nibbles`, which are places in a table."""
    np.take(table, packed & 15, out=out[..., 0, :])
    np.take(table, packed >> 4, out=out[..., 1, :])


def decode_iq4_nl(blocks: Bytes, out: Floats) -> None:
    """d * table[q]: d fp16, 32 nibbles."""
    look_up(IQ4_NUMBERS, blocks[:, 2:], out.reshape(-1, 2, 16))
    out *= halves(blocks[:, :2])


def decode_iq4_xs(blocks: Bytes, out: Floats) -> None:
    """d * (s - 32) * table[q]: d fp16, the high 2 bits of 8 s, their low 4, 256 nibbles."""
    high, low = blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8), blocks[:, 4:8, None]
    nibbles = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 8)
    scales = nibbles | (high.reshape(-1, 8) & 3) << 4
    look_up(IQ4_NUMBERS, blocks[:, 8:].reshape(-1, 8, 16), out.reshape(-1, 8, 2, 16))
    groups = out.reshape(-1, 8, 32)
    groups *= (halves(blocks[:, :2]) * (scales.astype(np.int8) - 32))[:, :, None]


def decode_mxfp4(blocks: Bytes, out: Floats) -> None:
    """2^(e - 128) * table[q]: e 8 bits, 32 nibbles."""
    look_up(MXFP4_NUMBERS, blocks[:, 1:], out.reshape(-1, 2, 16))
    out *= np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)


def decode_tq1_0(blocks: Bytes, out: Floats) -> None:
    """d * (t - 1): 256 digits t of base 3, d fp16. A byte has 5 of them, one of the last 4 bytes 4.

    Digits are fractions: a byte times a power of 3, modulo 256, has the next digit on top.
    """
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    runs = (blocks[:, None, :32], blocks[:, None, 32:48], blocks[:, None, 48:52])
    digits = [(run * powers[: 4 if run.shape[2] == 4 else 5]).reshape(len(run), -1) for run in runs]
    np.subtract(np.hstack(digits).astype(np.uint16) * 3 >> 8, 1, out=out, dtype=np.float32)
    out *= halves(blocks[:, 52:])


def decode_tq2_0(blocks: Bytes, out: Floats) -> None:
    """d * (q - 1): 256 q of 2 bits, d fp16."""
    two_bits(blocks[:, :64], out)
    out -= 1
    out *= halves(blocks[:, 64:])


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18, decode_q4_0),
    "Q4_1": BlockFormat(32, 20, decode_q4_1),
    "Q5_0": BlockFormat(32, 22, decode_q5_0),
    "Q5_1": BlockFormat(32, 24, decode_q5_1),
    "Q8_0": BlockFormat(32, 34, decode_q8_0),
    "Q2_K": BlockFormat(256, 84, decode_q2_k),
    "Q3_K": BlockFormat(256, 110, decode_q3_k),
    "Q4_K": BlockFormat(256, 144, decode_q4_k),
    "Q5_K": BlockFormat(256, 176, decode_q5_k),
    "Q6_K": BlockFormat(256, 210, decode_q6_k),
    "IQ4_NL": BlockFormat(32, 18, decode_iq4_nl),
    "IQ4_XS": BlockFormat(256, 136, decode_iq4_xs),
    "MXFP4": BlockFormat(32, 17, decode_mxfp4),
    "IQ1_S": BlockFormat(256, 50, codebook_blocks.decode_iq1_s),
    "IQ1_M": BlockFormat(256, 56, codebook_blocks.decode_iq1_m),
    "IQ2_XXS": BlockFormat(256, 66, codebook_blocks.decode_iq2_xxs),
    "IQ2_XS": BlockFormat(256, 74, codebook_blocks.decode_iq2_xs),
    "IQ2_S": BlockFormat(256, 82, codebook_blocks.decode_iq2_s),
    "IQ3_XXS": BlockFormat(256, 98, codebook_blocks.decode_iq3_xxs),
    "IQ3_S": BlockFormat(256, 110, codebook_blocks.decode_iq3_s),
    "TQ1_0": BlockFormat(256, 54, decode_tq1_0),
    "TQ2_0": BlockFormat(256, 66, decode_tq2_0),
}
