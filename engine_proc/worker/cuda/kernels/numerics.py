"""Arithmetic of kernels, on GPUs and in Triton's interpreter, and of their launches."""

from enum import IntEnum

import triton
import triton.language as tl
from triton import knobs

from headrace.engine_proc.worker.models.specs.decoder_spec import Norm

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))  # on the CPU, for tests


class Scaling(IntEnum):
    """The scaling of a norm, as `decoder_spec.Norm`, or no norm.

    Even ones scale by 1 + w; those from LAYER on subtract the mean.
    """

    NONE = 0
    RMS = 1
    RMS_ONE_PLUS = 2
    LAYER = 3
    LAYER_ONE_PLUS = 4

    @classmethod
    def of(cls, norm: Norm) -> "Scaling":
        """Return the scaling of a decoder's norms."""
        return cls[norm.name]


RMS, LAYER = tl.constexpr(int(Scaling.RMS)), tl.constexpr(int(Scaling.LAYER))


def cdiv(a: int, b: int) -> int:
    """Return a quotient, rounded up. Triton's own takes 2 us on the host, in each launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is no less than a positive number."""
    return 1 << (n - 1).bit_length()


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round fp32 to the nearest number of a type; beyond e4m3's largest, to that.

    The interpreter would cut it off in bf16, and miss by half near powers of two in e4m3.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        if INTERPRETED:
            bits = x.to(tl.uint32, bitcast=True)
            bits += 0x7FFFF + ((bits >> 20) & 1)
            normal = (bits & 0xFFF00000).to(tl.float32, bitcast=True)
            magnet = 1.5 * 2.0**14  # numbers beside it lie 2^-9 apart, as e4m3's smallest do
            x = tl.where(tl.abs(x) < 2.0**-6, (x + magnet) - magnet, normal)
    return x.to(dtype)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """Add a product to fp32 sums, without TF32.

    The interpreter cannot multiply bf16, and its product has other bits in other rows of a tile.
    Its sums have other bits if a factor is transposed in memory.
    """
    if INTERPRETED:
        b = tl.reshape(tl.reshape(b, [b.shape[0] * b.shape[1]]), b.shape)
        products = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
        return sums + tl.sum(products, 1)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """The hyperbolic tangent, absolute error below 2e-7."""
    e = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """The logarithm of 1 + e^x, as exact for small e^x as for large."""
    e = tl.exp(tl.minimum(x, 20.0))  # beyond, it is x in fp32
    sum = 1.0 + e
    # What the sum has lost of e is given back by the quotient.
    small = tl.where(sum == 1.0, e, tl.log(sum) * (e / tl.where(sum == 1.0, 1.0, sum - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def moments(
    x: tl.tensor, is_number: tl.tensor, NUM: tl.constexpr, eps: tl.tensor, SCALING: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the offset and the factor of a norm, per row of fp32 numbers."""
    mean = tl.zeros([x.shape[0]], tl.float32)
    if SCALING >= LAYER:
        mean = tl.sum(x, 1) / NUM
        x = tl.where(is_number, x - mean[:, None], 0.0)
    return mean, 1.0 / tl.sqrt(tl.sum(x * x, 1) / NUM + eps)


@triton.jit
def scaled(
    x: tl.tensor, mean: tl.tensor, scale: tl.tensor, weight: tl.tensor, SCALING: tl.constexpr
) -> tl.tensor:
    """Norm rows, given what `moments` has found, and weights by column."""
    if SCALING % 2 == 0:
        weight += 1.0
    return (x - mean[:, None]) * scale[:, None] * weight[None, :]
