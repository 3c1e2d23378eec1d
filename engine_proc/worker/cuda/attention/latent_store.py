"""The way of latents into their pages, and the RoPE of queries that meet them.

A token's latent is normalized, and a key that all heads share is rotated. Both lie in pages, one
behind the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.norm import reference as norm_in_torch
from headrace.engine_proc.worker.cuda.kernels.numerics import (
    Scaling,
    cdiv,
    moments,
    next_power_of_2,
    rounded,
    scaled,
)
from headrace.engine_proc.worker.cuda.kernels.rope_kv_store import Rotations
from headrace.engine_proc.worker.reference.torch_executor import rotate

BLOCK_TOKENS = 4
RMS = tl.constexpr(int(Scaling.RMS))


def latent_store(
    q: Tensor,
    kv: Tensor,
    latents: Tensor,
    kv_rows: Tensor,
    *,
    rotations: Rotations | None,
    weight: Tensor,
    eps: float,
    kv_scale: float = 1.0,
) -> Tensor:
    """Store latents and shared keys; return what rotates of queries, rotated.

    Args:
        q: [tokens, heads, query_dim]; the last rope_dim numbers rotate.
        kv: [tokens, rank + rope_dim]
        latents: [pages, page_tokens, 1, rank + rope_dim]
        kv_rows: [tokens], int64, page * page_tokens + row of the page; -1 is nowhere.
        rotations: of rope_dim / 2 pairs; None rotates nothing.
        weight: [rank], fp32, of the norm.
        kv_scale: what stored numbers are to be multiplied with.
    Returns:
        [tokens, heads, rope_dim]
    """
    num_tokens, num_heads, query_dim = q.shape
    rank = len(weight)
    rope_dim = latents.shape[3] - rank
    assert q.is_contiguous()
    assert latents.is_contiguous()
    assert kv.stride(1) == 1
    assert kv.shape[1] == rank + rope_dim
    assert rotations is None or 2 * rotations.cos.shape[1] == rope_dim
    turned = q.new_empty(num_tokens, num_heads, rope_dim)
    if num_tokens == 0:
        return turned
    latent_store_kernel[(cdiv(num_tokens, BLOCK_TOKENS), num_heads + 1)](
        turned,
        latents,
        q,
        kv,
        kv_rows,
        q if rotations is None else rotations.cos,
        q if rotations is None else rotations.sin,
        weight,
        eps,
        1 / kv_scale,
        num_tokens,
        kv.stride(0),
        BLOCK_TOKENS=BLOCK_TOKENS,
        NUM_HEADS=num_heads,
        QUERY_DIM=query_dim,
        RANK=rank,
        BLOCK_RANK=next_power_of_2(rank),
        NUM_PAIRS=rope_dim // 2,
        BLOCK_PAIRS=next_power_of_2(rope_dim // 2),
        IS_ROTATED=rotations is not None,
        IS_INTERLEAVED=rotations is not None and rotations.interleaved,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return turned


@triton.jit(do_not_specialize=["num_tokens"])
def latent_store_kernel(
    turned: tl.tensor,
    latents: tl.tensor,
    q: tl.tensor,
    kv: tl.tensor,
    kv_rows: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    factor: tl.tensor,
    num_tokens: tl.tensor,
    kv_stride: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
) -> None:
    ROPE_DIM: tl.constexpr = 2 * NUM_PAIRS
    token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    head, is_token = tl.program_id(1), token < num_tokens
    pair = tl.arange(0, BLOCK_PAIRS)
    at = (token * NUM_PAIRS)[:, None] + pair[None, :]
    is_pair = is_token[:, None] & (pair < NUM_PAIRS)[None, :]
    place_a, place_b = pair, pair + NUM_PAIRS
    if IS_INTERLEAVED:
        place_a, place_b = 2 * pair, 2 * pair + 1
    c, s = tl.full(at.shape, 1.0, tl.float32), tl.zeros(at.shape, tl.float32)
    if IS_ROTATED:
        c = tl.load(cos + at, mask=is_pair, other=0.0)
        s = tl.load(sin + at, mask=is_pair, other=0.0)
    if head < NUM_HEADS:
        number = token * NUM_HEADS + head
        x = q + ((number + 1) * QUERY_DIM - ROPE_DIM)[:, None]
        a = tl.load(x + place_a[None, :], mask=is_pair, other=0.0).to(tl.float32)
        b = tl.load(x + place_b[None, :], mask=is_pair, other=0.0).to(tl.float32)
        to = turned + (number * ROPE_DIM)[:, None]
        tl.store(to + place_a[None, :], rounded(a * c - b * s, to.dtype.element_ty), mask=is_pair)
        tl.store(to + place_b[None, :], rounded(b * c + a * s, to.dtype.element_ty), mask=is_pair)
        return
    row = tl.load(kv_rows + token, mask=is_token, other=-1)
    is_stored = (row >= 0)[:, None]
    to = latents + (row * (RANK + ROPE_DIM))[:, None]
    x = kv + (token * kv_stride)[:, None]
    a = tl.load(x + RANK + place_a[None, :], mask=is_pair, other=0.0).to(tl.float32)
    b = tl.load(x + RANK + place_b[None, :], mask=is_pair, other=0.0).to(tl.float32)
    a, b = (a * c - b * s) * factor, (b * c + a * s) * factor
    is_pair = is_pair & is_stored
    tl.store(to + RANK + place_a[None, :], rounded(a, to.dtype.element_ty), mask=is_pair)
    tl.store(to + RANK + place_b[None, :], rounded(b, to.dtype.element_ty), mask=is_pair)
    dim = tl.arange(0, BLOCK_RANK)
    is_number = is_token[:, None] & (dim < RANK)[None, :]
    numbers = tl.load(x + dim[None, :], mask=is_number, other=0.0).to(tl.float32)
    mean, scale = moments(numbers, is_number, RANK, eps, RMS)
    factors = tl.load(weight + dim, mask=dim < RANK, other=0.0)
    numbers = scaled(numbers, mean, scale, factors, RMS) * factor
    tl.store(to + dim[None, :], rounded(numbers, to.dtype.element_ty), mask=is_number & is_stored)


def reference(
    q: Tensor,
    kv: Tensor,
    latents: Tensor,
    kv_rows: Tensor,
    *,
    rotations: Rotations | None,
    weight: Tensor,
    eps: float,
    kv_scale: float = 1.0,
) -> Tensor:
    """Do as `latent_store`, in plain torch."""
    rank = len(weight)
    turned, shared = q[..., rank - latents.shape[3] :].float(), kv[:, None, rank:].float()
    if rotations is not None:
        cos, sin = rotations.cos[:, None], rotations.sin[:, None]
        turned, shared = (rotate(x, cos, sin, rotations.interleaved) for x in (turned, shared))
    own = norm_in_torch(kv[:, :rank].float(), weight, scaling=Scaling.RMS, eps=eps)
    is_stored = kv_rows >= 0
    stored = torch.cat([own, shared[:, 0]], 1)[is_stored] / kv_scale
    if latents.dtype == torch.float8_e4m3fn:
        stored = stored.clamp(-448, 448)  # a cast gives NaN
    latents.view(-1, latents.shape[3])[kv_rows[is_stored]] = stored.to(latents.dtype)
    return turned.to(q.dtype)
