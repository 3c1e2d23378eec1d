"""Several residuals of a token: how they begin, are mixed, take a layer's change, and end.

A program has all residuals of a token. They lie beside each other, [tokens, residuals, hidden].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.kernels.numerics import (
    next_power_of_2,
    rounded,
    tanh,
)

LEAST_SQUARE = tl.constexpr(1e-5)  # of the mean of a projected residual's squares
WARP_NUMBERS = 256  # of a residual


class ModeRouter(NamedTuple):
    """What the weights of a token's sums follow from, fp32."""

    norm: Tensor  # [hidden]
    matrix: Tensor  # [residuals, hidden]
    eps: float


def num_warps_for(hidden: int) -> int:
    """Return the warps of a program: a thread has some numbers of each residual in registers."""
    return min(8, max(1, next_power_of_2(hidden) // WARP_NUMBERS))


def begin(x: Tensor, projected: Tensor) -> Tensor:
    """Return the residuals of tokens: x, and what is projected with the magnitude of x.

    Args:
        x: [tokens, hidden]
        projected: [tokens, (residuals - 1) * hidden]
    """
    num_tokens, hidden = x.shape
    count = 1 + projected.shape[1] // hidden
    assert x.is_contiguous()
    assert projected.is_contiguous()
    out = x.new_empty(num_tokens, count, hidden)
    if num_tokens:
        begin_kernel[(num_tokens,)](
            out,
            x,
            projected,
            COUNT=count,
            NUM=hidden,
            BLOCK=next_power_of_2(hidden),
            num_warps=num_warps_for(hidden),
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def begin_kernel(
    out: tl.tensor,
    x: tl.tensor,
    projected: tl.tensor,
    COUNT: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_number = at < NUM
    first = tl.load(x + token * NUM + at, mask=is_number, other=0.0)
    tl.store(out + token * COUNT * NUM + at, first, mask=is_number)
    square = mean_square(first.to(tl.float32), NUM)
    for i in tl.static_range(1, COUNT):
        place = projected + (token * (COUNT - 1) + i - 1) * NUM + at
        own = matched(tl.load(place, mask=is_number, other=0.0).to(tl.float32), square, NUM)
        to = out + (token * COUNT + i) * NUM + at
        tl.store(to, rounded(own, out.dtype.element_ty), mask=is_number)


@triton.jit
def mean_square(x: tl.tensor, NUM: tl.constexpr) -> tl.tensor:
    """Return the mean of squares."""
    return tl.sum(x * x, 0) / NUM


@triton.jit
def matched(x: tl.tensor, square: tl.tensor, NUM: tl.constexpr) -> tl.tensor:
    """Return a projected residual with another magnitude, whose mean square is given."""
    own = tl.maximum(mean_square(x, NUM), LEAST_SQUARE)
    return x * (tl.sqrt(square) / tl.sqrt(own))


def predict(residuals: Tensor, router: ModeRouter, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residuals as sums of all, [tokens, residuals, hidden], and the first, apart.

    Args:
        weights: [residuals * residuals, residuals], fp32; the last are those of the router's.
    """
    num_tokens, count, hidden = residuals.shape
    assert residuals.is_contiguous()
    predicted = torch.empty_like(residuals)
    x = residuals.new_empty(num_tokens, hidden)
    if num_tokens:
        predict_kernel[(num_tokens,)](
            predicted,
            x,
            residuals,
            router.norm,
            router.matrix,
            weights,
            router.eps,
            COUNT=count,
            BLOCK_COUNT=next_power_of_2(count),
            NUM=hidden,
            BLOCK=next_power_of_2(hidden),
            num_warps=num_warps_for(hidden),
            enable_fp_fusion=False,
        )
    return predicted, x


@triton.jit
def predict_kernel(
    predicted: tl.tensor,
    x: tl.tensor,
    residuals: tl.tensor,
    norm: tl.tensor,
    router: tl.tensor,
    weights: tl.tensor,
    eps: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_number = at < NUM
    j = tl.arange(0, BLOCK_COUNT)
    begin = residuals + token * COUNT * NUM
    first = tl.load(begin + at, mask=is_number, other=0.0).to(tl.float32)
    modes = modes_of(first, norm, router, eps, at, j, COUNT, NUM)
    is_tile = (j < COUNT)[:, None] & is_number[None, :]
    tile = tl.load(begin + j[:, None] * NUM + at[None, :], mask=is_tile, other=0.0).to(tl.float32)
    for i in tl.static_range(COUNT):
        factors = factors_of(modes, weights + i * COUNT * COUNT, COUNT, BLOCK_COUNT)
        own = tl.load(begin + i * NUM + at, mask=is_number, other=0.0).to(tl.float32)
        own += tl.sum(tile * factors[:, None], 0)
        own = rounded(own, x.dtype.element_ty)
        tl.store(predicted + (token * COUNT + i) * NUM + at, own, mask=is_number)
        if i == 0:
            tl.store(x + token * NUM + at, own, mask=is_number)


@triton.jit
def modes_of(
    x: tl.tensor,
    norm: tl.tensor,
    router: tl.tensor,
    eps: tl.tensor,
    at: tl.tensor,
    j: tl.tensor,
    COUNT: tl.constexpr,
    NUM: tl.constexpr,
) -> tl.tensor:
    """Return what a router says of a row: a number of each residual, and 0 beyond them."""
    is_number = at < NUM
    normed = normed_numbers(x, norm, eps, at, NUM) / NUM
    is_tile = (j < COUNT)[:, None] & is_number[None, :]
    matrix = tl.load(router + j[:, None] * NUM + at[None, :], mask=is_tile, other=0.0)
    return tanh(tl.sum(matrix * normed[None, :], 1))


@triton.jit
def normed_numbers(
    x: tl.tensor, norm: tl.tensor, eps: tl.tensor, at: tl.tensor, NUM: tl.constexpr
) -> tl.tensor:
    """Return the norm of one row, fp32."""
    factors = tl.load(norm + at, mask=at < NUM, other=0.0)
    return x * (1.0 / tl.sqrt(mean_square(x, NUM) + eps)) * factors


@triton.jit
def factors_of(
    modes: tl.tensor, weights: tl.tensor, COUNT: tl.constexpr, BLOCK_COUNT: tl.constexpr
) -> tl.tensor:
    """Return weights . modes, a factor of each residual."""
    j, k = tl.arange(0, BLOCK_COUNT)[:, None], tl.arange(0, BLOCK_COUNT)[None, :]
    own = tl.load(weights + j * COUNT + k, mask=(j < COUNT) & (k < COUNT), other=0.0)
    return tl.sum(own * modes[None, :], 1)


def correct(
    predicted: Tensor, x: Tensor, router: ModeRouter, weights: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Spread what a layer has changed of the first residual; return all, and what is seen of it.

    Args:
        predicted: [tokens, residuals, hidden], before the layer.
        x: [tokens, hidden], the first one behind it.
        weights: [residuals, residuals], fp32; the last are those of the router's.
        scale: [hidden], fp32, of what is seen; None is 1.
    """
    num_tokens, count, hidden = predicted.shape
    assert predicted.is_contiguous()
    assert x.is_contiguous()
    residuals, seen = torch.empty_like(predicted), torch.empty_like(x)
    if num_tokens:
        correct_kernel[(num_tokens,)](
            residuals,
            seen,
            predicted,
            x,
            router.norm,
            router.matrix,
            weights,
            router.norm if scale is None else scale,
            router.eps,
            COUNT=count,
            BLOCK_COUNT=next_power_of_2(count),
            NUM=hidden,
            BLOCK=next_power_of_2(hidden),
            HAS_SCALE=scale is not None,
            num_warps=num_warps_for(hidden),
            enable_fp_fusion=False,
        )
    return residuals, seen


@triton.jit
def correct_kernel(
    residuals: tl.tensor,
    seen: tl.tensor,
    predicted: tl.tensor,
    x: tl.tensor,
    norm: tl.tensor,
    router: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_number = at < NUM
    j = tl.arange(0, BLOCK_COUNT)
    begin = token * COUNT * NUM
    behind = tl.load(x + token * NUM + at, mask=is_number, other=0.0).to(tl.float32)
    before = tl.load(predicted + begin + at, mask=is_number, other=0.0).to(tl.float32)
    modes = modes_of(behind, norm, router, eps, at, j, COUNT, NUM)
    factors = factors_of(modes, weights, COUNT, BLOCK_COUNT) + 1.0
    for i in tl.static_range(COUNT):
        place = begin + i * NUM + at
        own = tl.load(predicted + place, mask=is_number, other=0.0).to(tl.float32)
        own += (behind - before) * tl.sum(tl.where(j == i, factors, 0.0), 0)
        tl.store(residuals + place, rounded(own, residuals.dtype.element_ty), mask=is_number)
        if i == 0:
            if HAS_SCALE:
                own *= tl.load(scale + at, mask=is_number, other=0.0)
            tl.store(seen + token * NUM + at, rounded(own, seen.dtype.element_ty), mask=is_number)


def spread(residuals: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Add `norm(x)` to all residuals but the first, in place.

    Args:
        x: [tokens, hidden]
        weight: [hidden], fp32.
    """
    num_tokens, count, hidden = residuals.shape
    assert residuals.is_contiguous()
    assert x.is_contiguous()
    if num_tokens:
        spread_kernel[(num_tokens,)](
            residuals,
            x,
            weight,
            eps,
            COUNT=count,
            NUM=hidden,
            BLOCK=next_power_of_2(hidden),
            num_warps=num_warps_for(hidden),
            enable_fp_fusion=False,
        )


@triton.jit
def spread_kernel(
    residuals: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    COUNT: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_number = at < NUM
    added = tl.load(x + token * NUM + at, mask=is_number, other=0.0).to(tl.float32)
    added = normed_numbers(added, weight, eps, at, NUM)
    for i in tl.static_range(1, COUNT):
        place = residuals + (token * COUNT + i) * NUM + at
        own = tl.load(place, mask=is_number, other=0.0).to(tl.float32) + added
        tl.store(place, rounded(own, residuals.dtype.element_ty), mask=is_number)


def join(first: Tensor, back: Tensor) -> Tensor:
    """Return the mean of all residuals, [rows, hidden].

    Args:
        first: [rows, hidden]
        back: the further ones, projected back, [residuals - 1, rows, hidden]. They get the
            magnitude of the first.
    """
    (num_rows, hidden), count = first.shape, 1 + len(back)
    assert first.is_contiguous()
    assert back.is_contiguous()
    out = torch.empty_like(first)
    if num_rows:
        join_kernel[(num_rows,)](
            out,
            first,
            back,
            num_rows,
            COUNT=count,
            NUM=hidden,
            BLOCK=next_power_of_2(hidden),
            num_warps=num_warps_for(hidden),
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def join_kernel(
    out: tl.tensor,
    first: tl.tensor,
    back: tl.tensor,
    num_rows: tl.tensor,
    COUNT: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_number = at < NUM
    total = tl.load(first + row * NUM + at, mask=is_number, other=0.0).to(tl.float32)
    square = mean_square(total, NUM)
    for i in tl.static_range(COUNT - 1):
        place = back + (i * num_rows + row) * NUM + at
        own = tl.load(place, mask=is_number, other=0.0).to(tl.float32)
        total += matched(own, square, NUM)
    mean = rounded(total / COUNT, out.dtype.element_ty)
    tl.store(out + row * NUM + at, mean, mask=is_number)


def like(x: Tensor, other: Tensor) -> Tensor:
    """Give rows the magnitude of others, in plain torch, in fp32."""
    x, other = x.float(), other.float()
    squares = x.square().mean(-1, keepdim=True).clamp(min=LEAST_SQUARE.value)
    return x * (other.square().mean(-1, keepdim=True).sqrt() / squares.sqrt())


def reference_begin(x: Tensor, projected: Tensor) -> Tensor:
    """Do as `begin`, in plain torch."""
    others = like(projected.view(len(x), -1, x.shape[1]), x[:, None])
    return torch.cat([x[:, None], others.to(x.dtype)], 1)


def reference_modes(x: Tensor, router: ModeRouter) -> Tensor:
    """Return what the weights of sums follow from, in plain torch, [tokens, residuals]."""
    normed = F.rms_norm(x.float(), x.shape[-1:], router.norm, router.eps) / x.shape[-1]
    return torch.tanh(normed @ router.matrix.T)


def reference_predict(residuals: Tensor, router: ModeRouter, weights: Tensor) -> Tensor:
    """Return the sums of `predict`, in plain torch."""
    count = residuals.shape[1]
    modes = reference_modes(residuals[:, 0], router)
    factors = (modes @ weights.T).view(len(modes), count, count)
    return (residuals.float() + factors @ residuals.float()).to(residuals.dtype)


def reference_correct(
    predicted: Tensor, x: Tensor, router: ModeRouter, weights: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Do as `correct`, in plain torch."""
    factors = 1 + reference_modes(x, router) @ weights.T
    change = (x.float() - predicted[:, 0].float())[:, None] * factors[:, :, None]
    residuals = predicted.float() + change
    seen = residuals[:, 0] if scale is None else residuals[:, 0] * scale
    return residuals.to(x.dtype), seen.to(x.dtype)


def reference_join(first: Tensor, back: Tensor) -> Tensor:
    """Do as `join`, in plain torch."""
    return torch.cat([first.float()[None], like(back, first)]).mean(0).to(first.dtype)
