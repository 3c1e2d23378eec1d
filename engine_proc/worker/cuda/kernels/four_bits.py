"""Decodes tiles of matrices whose numbers have 4 bits, two adjacent ones in a byte."""

import triton
import triton.language as tl

ZERO_BITS = tl.constexpr(0x4B000000)  # those of 2^23: whole numbers follow, one bit apart
ZERO = tl.constexpr(float(1 << 23))


@triton.jit
def decode_int4(
    codes: tl.tensor,
    zeros: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    first: tl.tensor,
    NUM_TERMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the numbers of a tile, [rows, terms] from `first` on; 0 beyond the matrix.

    A number is `(code - zero) * scale` of its group of terms. Code and zero are added to 2^23, so
    that no number is converted; their difference is exact.
    """
    NUM_GROUPS: tl.constexpr = (NUM_TERMS + GROUP - 1) // GROUP
    TILE_GROUPS: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK and GROUP < NUM_TERMS else 1
    NUM_ROWS: tl.constexpr = rows.shape[0]
    bits = load_codes(codes, rows, is_row, first, ZERO_BITS, NUM_TERMS, BLOCK)
    steps = bits.to(tl.float32, bitcast=True)
    group = first // GROUP + tl.arange(0, TILE_GROUPS)[None, :]
    at, is_group = rows[:, None] * NUM_GROUPS + group, is_row[:, None] & (group < NUM_GROUPS)
    zero = tl.load(zeros + at, mask=is_group, other=0).to(tl.float32) + ZERO
    scale = tl.load(scales + at, mask=is_group, other=0.0)
    steps = tl.reshape(steps, [NUM_ROWS, TILE_GROUPS, BLOCK // TILE_GROUPS])
    numbers = (steps - zero[:, :, None]) * scale[:, :, None]
    return tl.reshape(numbers, [NUM_ROWS, BLOCK])


@triton.jit
def decode_mxfp4(
    codes: tl.tensor,
    exponents: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    first: tl.tensor,
    NUM_TERMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Do as `decode_int4`, of floats (e2m1) that share an exponent.

    Twice a float is a small integer, times a power of two that has no denormals: a group whose
    exponent is below 2 is 0.
    """
    NUM_GROUPS: tl.constexpr = NUM_TERMS // GROUP
    TILE_GROUPS: tl.constexpr = BLOCK // GROUP
    NUM_ROWS: tl.constexpr = rows.shape[0]
    code = load_codes(codes, rows, is_row, first, 0, NUM_TERMS, BLOCK)
    size = code & 7
    twice = tl.where(size < 4, size, tl.where(size < 6, 2 * size - 4, 4 * size - 16))
    steps = tl.where(code < 8, twice, -twice).to(tl.float32)
    group = first // GROUP + tl.arange(0, TILE_GROUPS)[None, :]
    at, is_group = rows[:, None] * NUM_GROUPS + group, is_row[:, None] & (group < NUM_GROUPS)
    exponent = tl.load(exponents + at, mask=is_group, other=0).to(tl.int32)
    scale = (tl.maximum(exponent - 1, 0) << 23).to(tl.float32, bitcast=True)
    steps = tl.reshape(steps, [NUM_ROWS, TILE_GROUPS, BLOCK // TILE_GROUPS])
    return tl.reshape(steps * scale[:, :, None], [NUM_ROWS, BLOCK])


@triton.jit
def load_codes(
    codes: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    first: tl.tensor,
    BITS: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return codes beside other bits, [rows, terms] from `first` on, int32.

    Of two codes in a byte the first has the low bits.
    """
    pair = first // 2 + tl.arange(0, BLOCK // 2)[None, :]
    is_pair = is_row[:, None] & (pair < NUM_TERMS // 2)
    packed = tl.load(codes + rows[:, None] * (NUM_TERMS // 2) + pair, mask=is_pair, other=0)
    packed = packed.to(tl.int32)
    return tl.interleave((packed & 15) | BITS, (packed >> 4) | BITS)
