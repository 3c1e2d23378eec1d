"""GGUF's block formats with codebooks, IQ1 to IQ3, decoded to fp32.

A code stands for a group of 4 or 8 numbers (`codebooks.py`). Signs are bits of their own, and IQ1
adds an eighth to each number, or takes it away. A block has 256 numbers. Rounding is ggml's.
"""

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.codebooks import groups_of

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.integer]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

HALF, QUARTER, EIGHTH = np.float32(0.5), np.float32(0.25), np.float32(0.125)
# Seven signs, and an eighth that makes their number even.
EVEN_SIGNS = np.array([i | i.bit_count() % 2 << 7 for i in range(128)], np.uint8)


def fp16(columns: Bytes) -> Floats:
    """Read fp16 scales, [blocks, 2] bytes."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def halves(columns: Bytes) -> Halves:
    """Read 16-bit words, [blocks, 2 * n] bytes."""
    return np.ascontiguousarray(columns).view("<u2")


def words(columns: Bytes) -> Words:
    """Read 32-bit words, [blocks, 4 * n] bytes."""
    return np.ascontiguousarray(columns).view("<u4")


def fields(packed: npt.NDArray[np.unsignedinteger], bits: int, step: int, count: int) -> Halves:
    """Unpack [blocks, n] to [blocks, n * count]: `count` fields of `bits`, `step` bits apart."""
    shifts = (np.arange(count) * step).astype(packed.dtype)
    found = packed[:, :, None] >> shifts & packed.dtype.type((1 << bits) - 1)
    return found.reshape(len(packed), -1).astype(np.uint16)


def put(out: Floats, scales: Floats, groups: Floats, signs: Bytes) -> None:
    """Write groups of 8, times a scale for as many of them as there are, with their signs."""
    numbers = scales[:, :, None] * groups.reshape(*scales.shape, -1)
    minus = np.unpackbits(signs, axis=1, bitorder="little")
    numbers = numbers.reshape(out.shape)
    np.copyto(out, np.where(minus, -numbers, numbers))


def decode_iq2_xxs(blocks: Bytes, out: Floats) -> None:
    """d, 8 of { 4 codes; 4 x 7 signs, 4 bits of scale }: d * (s + 1/2) / 4."""
    pairs = blocks[:, 2:].reshape(-1, 8, 8)
    tails = words(pairs[:, :, 4:].reshape(-1, 32))
    scales = fp16(blocks[:, :2]) * (HALF + (tails >> 28).astype(np.float32)) * QUARTER
    groups = groups_of("IQ2_XXS")[pairs[:, :, :4]]
    put(out, scales, groups, EVEN_SIGNS[fields(tails, 7, 7, 4)])


def decode_iq2_xs(blocks: Bytes, out: Floats) -> None:
    """d, 32 of { 9 bits of code, 7 signs }, 16 scales of 4 bits: d * (s + 1/2) / 4."""
    codes = halves(blocks[:, 2:66])
    scales = fp16(blocks[:, :2]) * (HALF + fields(blocks[:, 66:], 4, 4, 2)) * QUARTER
    put(out, scales, groups_of("IQ2_XS")[codes & 511], EVEN_SIGNS[codes >> 9])


def decode_iq2_s(blocks: Bytes, out: Floats) -> None:
    """d, 32 codes, 256 signs, 2 high bits of each code, 16 scales of 4 bits: d * (s + 1/2) / 4."""
    codes = blocks[:, 2:34] | fields(blocks[:, 66:74], 2, 2, 4) << 8
    scales = fp16(blocks[:, :2]) * (HALF + fields(blocks[:, 74:], 4, 4, 2)) * QUARTER
    put(out, scales, groups_of("IQ2_S")[codes], blocks[:, 34:66])


def decode_iq3_xxs(blocks: Bytes, out: Floats) -> None:
    """d, 64 codes, 8 of { 4 x 7 signs, 4 bits of scale }: d * (s + 1/2) / 2."""
    tails = words(blocks[:, 66:])
    scales = fp16(blocks[:, :2]) * (HALF + (tails >> 28).astype(np.float32)) * HALF
    put(out, scales, groups_of("IQ3_XXS")[blocks[:, 2:66]], EVEN_SIGNS[fields(tails, 7, 7, 4)])


def decode_iq3_s(blocks: Bytes, out: Floats) -> None:
    """d, 64 codes, a high bit of each, 256 signs, 8 scales of 4 bits: d * (2 s + 1)."""
    codes = blocks[:, 2:66] | fields(blocks[:, 66:74], 1, 1, 8) << 8
    scales = fp16(blocks[:, :2]) * (1 + 2 * fields(blocks[:, 106:], 4, 4, 2))
    put(out, scales, groups_of("IQ3_S")[codes], blocks[:, 74:106])


def shifted(out: Floats, scales: Floats, codes: Codes, is_less: npt.NDArray[np.bool_]) -> None:
    """Write IQ1's groups, an eighth more or less, times a scale for as many as there are."""
    steps = np.where(is_less, -EIGHTH, EIGHTH)
    steps = np.repeat(steps, codes.shape[1] // steps.shape[1], axis=1)
    groups = groups_of("IQ1_S")[codes] + steps[:, :, None]
    np.copyto(out, (scales[:, :, None] * groups.reshape(*scales.shape, -1)).reshape(out.shape))


def decode_iq1_s(blocks: Bytes, out: Floats) -> None:
    """d, 32 codes, 8 of { 4 x 3 high bits, 3 bits of scale, less }: d * (2 s + 1)."""
    tails = halves(blocks[:, 34:])
    codes = blocks[:, 2:34] | fields(tails, 3, 3, 4) << 8
    shifted(out, fp16(blocks[:, :2]) * (2 * (tails >> 12 & 7) + 1), codes, tails >= 1 << 15)


def decode_iq1_m(blocks: Bytes, out: Floats) -> None:
    """32 codes, 32 of { 3 high bits, less }, 4 of { 4 x 3 bits of scale, 4 bits of d }."""
    tails = halves(blocks[:, 48:])
    d = np.bitwise_or.reduce((tails >> 12) << np.array([0, 4, 8, 12], np.uint16), axis=1)
    scales = d.view("<f2").astype(np.float32)[:, None] * (2 * fields(tails, 3, 3, 4) + 1)
    highs = fields(blocks[:, 32:48], 4, 4, 2)
    shifted(out, scales, blocks[:, :32] | (highs & 7) << 8, highs >= 8)
