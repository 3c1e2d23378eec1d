"""RoPE, the norm of each head before or behind it, and the way of keys and values into pages.

One product gives queries, keys and values of all heads; a program has a head of some tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import rms_norm

from headrace.engine_proc.worker.cuda.kernels.norm import reference as norm_in_torch
from headrace.engine_proc.worker.cuda.kernels.numerics import (
    LAYER,
    RMS,
    Scaling,
    cdiv,
    moments,
    next_power_of_2,
    rounded,
    scaled,
)
from headrace.engine_proc.worker.models.specs.decoder_spec import QueryTemperature, RopeTable
from headrace.engine_proc.worker.reference.torch_executor import rotate, temperatures

BLOCK_TOKENS = 8
WIDE_DIM = 256  # programs have fewer tokens of wider heads
NO_SCALING = tl.constexpr(int(Scaling.NONE))


@dataclass(frozen=True)
class Rotations:
    """The rotation of each token's pairs."""

    cos: Tensor  # [tokens, pairs], fp32
    sin: Tensor  # the same
    interleaved: bool = False  # pairs are (2i, 2i + 1) rather than (i, i + pairs)


def rotations_at(
    ropes: Sequence[RopeTable],
    inv_freqs: Sequence[Tensor],
    axes: Sequence[Tensor | None],
    positions: Tensor,
) -> list[Rotations]:
    """Return the rotations of every kind of layer.

    Args:
        inv_freqs, axes: of the tables, on the device; axes are None where there is one position.
        positions: [tokens, 3], of time, height and width; or one for all, [tokens, 1].
    """
    rotations = []
    for rope, inv_freq, own in zip(ropes, inv_freqs, axes, strict=True):
        of_pairs = positions[:, :1] if own is None else positions.index_select(1, own)
        angles = of_pairs.float() * inv_freq
        cos, sin = angles.cos(), angles.sin()
        if rope.scale != 1:
            cos, sin = cos * rope.scale, sin * rope.scale
        rotations.append(Rotations(cos, sin, rope.interleaved))
    return rotations


@dataclass(frozen=True)
class HeadNorm:
    """The norm of single heads; keys have another weight than queries."""

    scaling: Scaling
    weights: Tensor  # [2, head_dim], fp32: of queries, of keys
    eps: float
    is_after_rope: bool = False


def temperatures_at(positions: Tensor, temperature: QueryTemperature) -> Tensor:
    """Return what queries at some positions are multiplied with; padding is at -1."""
    return temperatures(temperature, positions.clamp(min=0))


def rope_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    kv_rows: Tensor,
    *,
    rotations: Rotations | None,
    head_norm: HeadNorm | None = None,
    clip: float | None = None,
    query_factors: Tensor | None = None,
    value_eps: float | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    stores: bool = True,
) -> Tensor:
    """Norm and rotate queries and keys; store keys and values.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]; without keys and values if not `stores`.
        keys, values: [pages, page_tokens, kv_heads, head_dim]
        kv_rows: [tokens], int64, page * page_tokens + row of the page; -1 is nowhere.
        rotations: None rotates nothing.
        clip: the largest query, key and value before RoPE, of either sign.
        query_factors: [tokens], fp32, of `temperatures_at`; None is 1.
        value_eps: of the norm of each head's values, which has no weights; None is no norm.
        kv_scales: what stored keys and values are to be multiplied with.
    Returns:
        The queries, [tokens, heads, head_dim].
    """
    num_kv_heads, head_dim = keys.shape[2] * stores, keys.shape[3]
    num_all_heads = qkv.shape[1] // head_dim
    block_tokens = BLOCK_TOKENS if head_dim <= WIDE_DIM else BLOCK_TOKENS // 2
    assert qkv.is_contiguous()
    assert keys.is_contiguous()
    assert values.is_contiguous()
    num_pairs = 0 if rotations is None else rotations.cos.shape[1]
    assert rotations is None or (rotations.cos.is_contiguous() and rotations.sin.is_contiguous())
    num_heads = num_all_heads - 2 * num_kv_heads
    queries = qkv.new_empty(len(qkv), num_heads, head_dim)
    if len(qkv) == 0:
        return queries
    rope_store_kernel[(cdiv(len(qkv), block_tokens), num_all_heads)](
        queries,
        qkv,
        keys,
        values,
        kv_rows,
        qkv if rotations is None else rotations.cos,
        qkv if rotations is None else rotations.sin,
        qkv if head_norm is None else head_norm.weights,
        qkv if query_factors is None else query_factors,
        1.0 if head_norm is None else head_norm.eps,
        1 / kv_scales[0],
        1 / kv_scales[1],
        len(qkv),
        BLOCK_TOKENS=block_tokens,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=next_power_of_2(head_dim),
        NUM_PAIRS=num_pairs,
        BLOCK_PAIRS=next_power_of_2(max(num_pairs, 1)),
        IS_INTERLEAVED=rotations is not None and rotations.interleaved,
        SCALING=int(Scaling.NONE if head_norm is None else head_norm.scaling),
        NORMS_AFTER=head_norm is not None and head_norm.is_after_rope,
        CLIP=clip or 0.0,
        HAS_FACTORS=query_factors is not None,
        VALUE_EPS=value_eps or 0.0,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return queries


@triton.jit(do_not_specialize=["num_tokens"])
def rope_store_kernel(
    queries: tl.tensor,
    qkv: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    kv_rows: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weights: tl.tensor,
    query_factors: tl.tensor,
    eps: tl.tensor,
    key_factor: tl.tensor,
    value_factor: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    SCALING: tl.constexpr,
    NORMS_AFTER: tl.constexpr,
    CLIP: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    VALUE_EPS: tl.constexpr,
) -> None:
    SCALING_BEFORE: tl.constexpr = NO_SCALING if NORMS_AFTER else SCALING
    token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    head, is_token = tl.program_id(1), token < num_tokens
    x = qkv + ((token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM)[:, None]
    kv_row = tl.load(kv_rows + token, mask=is_token, other=-1)
    is_stored = kv_row >= 0
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = dim < HEAD_DIM
    is_number = is_token[:, None] & is_dim[None, :]
    numbers = tl.load(x + dim[None, :], mask=is_number, other=0.0).to(tl.float32)
    if head >= NUM_HEADS + NUM_KV_HEADS:
        kv_head = head - NUM_HEADS - NUM_KV_HEADS
        if VALUE_EPS > 0:
            numbers *= moments(numbers, is_number, HEAD_DIM, VALUE_EPS, RMS)[1][:, None]
        to_values = values + ((kv_row * NUM_KV_HEADS + kv_head) * HEAD_DIM)[:, None]
        write(to_values, dim, is_stored, is_dim, clipped(numbers, CLIP) * value_factor)
        return
    weight = weights + (head >= NUM_HEADS).to(tl.int32) * HEAD_DIM
    mean, scale = tl.zeros([BLOCK_TOKENS], tl.float32), tl.zeros([BLOCK_TOKENS], tl.float32)
    if SCALING_BEFORE != NO_SCALING:
        mean, scale = moments(numbers, is_number, HEAD_DIM, eps, SCALING)
    is_kept = is_dim & (dim >= 2 * NUM_PAIRS)
    kept = normed(x, dim, is_token, is_kept, weight, mean, scale, SCALING_BEFORE, CLIP)
    pair = tl.arange(0, BLOCK_PAIRS)
    is_pair = pair < NUM_PAIRS
    at_a, at_b = pair, pair + NUM_PAIRS
    if IS_INTERLEAVED:
        at_a, at_b = 2 * pair, 2 * pair + 1
    a = normed(x, at_a, is_token, is_pair, weight, mean, scale, SCALING_BEFORE, CLIP)
    b = normed(x, at_b, is_token, is_pair, weight, mean, scale, SCALING_BEFORE, CLIP)
    if NUM_PAIRS > 0:
        at = (token * NUM_PAIRS)[:, None] + pair[None, :]
        c = tl.load(cos + at, mask=is_token[:, None] & is_pair[None, :], other=0.0)
        s = tl.load(sin + at, mask=is_token[:, None] & is_pair[None, :], other=0.0)
        a, b = a * c - b * s, b * c + a * s
    if NORMS_AFTER:
        mean, scale = moments_of_parts(kept, a, b, is_kept, is_pair, HEAD_DIM, eps, SCALING)
        kept = weighted(kept, dim, is_kept, weight, mean, scale, SCALING)
        a = weighted(a, at_a, is_pair, weight, mean, scale, SCALING)
        b = weighted(b, at_b, is_pair, weight, mean, scale, SCALING)
    if head < NUM_HEADS:
        if HAS_FACTORS:
            factor = tl.load(query_factors + token, mask=is_token, other=1.0)[:, None]
            kept, a, b = kept * factor, a * factor, b * factor
        to_queries = queries + ((token * NUM_HEADS + head) * HEAD_DIM)[:, None]
        write(to_queries, dim, is_token, is_kept, kept)
        write_pairs(to_queries, at_a, at_b, is_token, is_pair, a, b)
    else:
        to_keys = keys + ((kv_row * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM)[:, None]
        write(to_keys, dim, is_stored, is_kept, kept * key_factor)
        write_pairs(to_keys, at_a, at_b, is_stored, is_pair, a * key_factor, b * key_factor)


@triton.jit
def normed(
    x: tl.tensor,
    at: tl.tensor,
    is_token: tl.tensor,
    is_number: tl.tensor,
    weight: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    SCALING: tl.constexpr,
    CLIP: tl.constexpr,
) -> tl.tensor:
    """Return some numbers of heads before RoPE, normed if heads are."""
    mask = is_token[:, None] & is_number[None, :]
    numbers = tl.load(x + at[None, :], mask=mask, other=0.0).to(tl.float32)
    if SCALING != NO_SCALING:
        numbers = weighted(numbers, at, is_number, weight, mean, scale, SCALING)
    return clipped(numbers, CLIP)


@triton.jit
def clipped(numbers: tl.tensor, CLIP: tl.constexpr) -> tl.tensor:
    """Return numbers no larger than a limit of either sign; 0 is none."""
    if CLIP > 0:
        numbers = tl.minimum(tl.maximum(numbers, -CLIP), CLIP)
    return numbers


@triton.jit
def weighted(
    numbers: tl.tensor,
    at: tl.tensor,
    is_number: tl.tensor,
    weight: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    SCALING: tl.constexpr,
) -> tl.tensor:
    """Norm some numbers of heads, given what `moments` has found of all."""
    factors = tl.load(weight + at, mask=is_number, other=0.0)
    return scaled(numbers, mean, scale, factors, SCALING)


@triton.jit
def moments_of_parts(
    kept: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    is_kept: tl.tensor,
    is_pair: tl.tensor,
    NUM: tl.constexpr,
    eps: tl.tensor,
    SCALING: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Do as `moments`, of heads whose pairs are rotated; what is not there is 0."""
    mean = tl.zeros([kept.shape[0]], tl.float32)
    if SCALING >= LAYER:
        mean = (tl.sum(kept, 1) + tl.sum(a, 1) + tl.sum(b, 1)) / NUM
        kept = tl.where(is_kept[None, :], kept - mean[:, None], 0.0)
        a = tl.where(is_pair[None, :], a - mean[:, None], 0.0)
        b = tl.where(is_pair[None, :], b - mean[:, None], 0.0)
    squares = tl.sum(kept * kept, 1) + tl.sum(a * a, 1) + tl.sum(b * b, 1)
    return mean, 1.0 / tl.sqrt(squares / NUM + eps)


@triton.jit
def write_pairs(
    to: tl.tensor,
    at_a: tl.tensor,
    at_b: tl.tensor,
    is_token: tl.tensor,
    is_pair: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
) -> None:
    """Round what is rotated of heads, and store it."""
    write(to, at_a, is_token, is_pair, a)
    write(to, at_b, is_token, is_pair, b)


@triton.jit
def write(
    to: tl.tensor, at: tl.tensor, is_token: tl.tensor, is_number: tl.tensor, numbers: tl.tensor
) -> None:
    """Round some numbers of heads, and store them."""
    mask = is_token[:, None] & is_number[None, :]
    tl.store(to + at[None, :], rounded(numbers, to.dtype.element_ty), mask=mask)


def norm_both(q: Tensor, k: Tensor, head_norm: HeadNorm) -> tuple[Tensor, Tensor]:
    """Norm queries and keys, in plain torch."""
    q, k = (
        norm_in_torch(x, weight, scaling=head_norm.scaling, eps=head_norm.eps)
        for x, weight in zip((q, k), head_norm.weights, strict=True)
    )
    return q, k


def reference(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    kv_rows: Tensor,
    *,
    rotations: Rotations | None,
    head_norm: HeadNorm | None = None,
    clip: float | None = None,
    query_factors: Tensor | None = None,
    value_eps: float | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    stores: bool = True,
) -> Tensor:
    """Do as `rope_store`, in plain torch."""
    num_kv_heads, head_dim = keys.shape[2] * stores, keys.shape[3]
    heads = qkv.view(len(qkv), -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    num_stored = num_heads + num_kv_heads
    q, k, v = heads.float().tensor_split((num_heads, num_stored), dim=1)
    if head_norm is not None and not head_norm.is_after_rope:
        q, k = norm_both(q, k, head_norm)
    if value_eps is not None:
        v = rms_norm(v, (head_dim,), eps=value_eps)
    if clip is not None:
        q, k, v = (x.clamp(-clip, clip) for x in (q, k, v))
    if rotations is not None:
        cos, sin = rotations.cos[:, None], rotations.sin[:, None]
        q = rotate(q, cos, sin, rotations.interleaved)
        k = rotate(k, cos, sin, rotations.interleaved) if stores else k
    if head_norm is not None and head_norm.is_after_rope:
        q, k = norm_both(q, k, head_norm)
    if query_factors is not None:
        q = q * query_factors[:, None, None]
    if not stores:
        return q.to(qkv.dtype)
    is_stored = kv_rows >= 0
    rows = kv_rows[is_stored]
    for pages, x, scale in ((keys, k, kv_scales[0]), (values, v, kv_scales[1])):
        stored = x[is_stored] * (1 / scale)
        if pages.dtype == torch.float8_e4m3fn:
            stored = stored.clamp(-448, 448)  # a cast gives NaN
        pages.view(-1, num_kv_heads, head_dim)[rows] = stored.to(pages.dtype)
    return q.to(qkv.dtype)
