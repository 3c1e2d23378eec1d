"""Queries are normed and rotated, keys too, and keys and values are where they belong."""

from typing import Any

import pytest
import torch

from headrace.engine_proc.worker.cuda.kernels.numerics import Scaling
from headrace.engine_proc.worker.cuda.kernels.rope_kv_store import (
    HeadNorm,
    Rotations,
    reference,
    rope_store,
)

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
PAGE_TOKENS, NUM_PAGES = 16, 3


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "num_pairs", "interleaved", "scaling", "dtype"),
    [
        (4, 2, 16, 8, False, Scaling.NONE, torch.float32),
        (4, 2, 16, 8, True, Scaling.RMS, torch.float32),
        (3, 1, 10, 3, False, Scaling.RMS_ONE_PLUS, torch.float32),  # some numbers stay
        (1, 1, 10, 5, True, Scaling.LAYER, torch.bfloat16),
        (2, 2, 8, 0, False, Scaling.RMS, torch.float16),
        (2, 1, 64, 32, False, Scaling.NONE, torch.bfloat16),
    ],
)
def test_heads_are_as_in_torch(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_pairs: int,
    interleaved: bool,
    scaling: Scaling,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    num_tokens = 11
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(device, dtype)
    pages = torch.randn(2, NUM_PAGES, PAGE_TOKENS, num_kv_heads, head_dim).to(device, dtype)
    expected_pages = pages.clone()
    kv_rows = torch.randperm(NUM_PAGES * PAGE_TOKENS)[:num_tokens].to(device)
    kv_rows[[2, 10]] = -1
    rotations = head_norm = None
    if num_pairs:
        angles = torch.randn(num_tokens, num_pairs, device=device) * 5
        rotations = Rotations(angles.cos(), angles.sin(), interleaved)
    if scaling != Scaling.NONE:
        head_norm = HeadNorm(scaling, torch.randn(2, head_dim, device=device), 1e-3)
    expected = reference(qkv, *expected_pages, kv_rows, rotations=rotations, head_norm=head_norm)
    queries = rope_store(qkv, *pages, kv_rows, rotations=rotations, head_norm=head_norm)
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(queries, expected, **tolerance)
    torch.testing.assert_close(pages, expected_pages, **tolerance)


@pytest.mark.parametrize("scaling", [Scaling.RMS, Scaling.LAYER_ONE_PLUS])
@pytest.mark.parametrize("head_dim", [16, 10])
def test_heads_are_normed_after_rope_and_limited_before_it(
    head_dim: int, scaling: Scaling, device: torch.device
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(9, 5 * head_dim, device=device) * 2
    pages = torch.zeros(2, NUM_PAGES, PAGE_TOKENS, 1, head_dim, device=device)
    expected_pages = pages.clone()
    kv_rows = torch.randperm(NUM_PAGES * PAGE_TOKENS)[:9].to(device)
    angles = torch.randn(9, 4, device=device)
    weights = torch.randn(2, head_dim, device=device)
    options: dict[str, Any] = {
        "rotations": Rotations(1.3 * angles.cos(), 1.3 * angles.sin()),
        "head_norm": HeadNorm(scaling, weights, 1e-3, is_after_rope=True),
        "clip": 1.5,
        "query_factors": torch.rand(9, device=device),
        "value_eps": 1e-3 if scaling == Scaling.RMS else None,
    }
    expected = reference(qkv, *expected_pages, kv_rows, **options)
    queries = rope_store(qkv, *pages, kv_rows, **options)
    torch.testing.assert_close(queries, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pages, expected_pages, atol=1e-5, rtol=1e-5)
    assert pages[1].abs().max() == 1.5


@pytest.mark.parametrize("head_dim", [16, 320])
def test_queries_alone_leave_pages_as_they_are(head_dim: int, device: torch.device) -> None:
    """Of a layer that reads the keys of another; of wide heads a program has fewer tokens."""
    torch.manual_seed(0)
    qkv = torch.randn(9, 4 * head_dim, device=device)
    pages = torch.zeros(2, NUM_PAGES, PAGE_TOKENS, 2, head_dim, device=device)
    rows = torch.arange(9, device=device)
    angles = torch.randn(9, head_dim // 2, device=device)
    rotations = Rotations(angles.cos(), angles.sin())
    weights = torch.randn(2, head_dim, device=device)
    norm = HeadNorm(Scaling.RMS, weights, 1e-3)
    options = {"rotations": rotations, "head_norm": norm, "value_eps": 1e-3}
    queries = rope_store(qkv, *pages, rows, **options, stores=False)
    assert not pages.any()
    torch.testing.assert_close(queries, reference(qkv, *pages, rows, **options, stores=False))
    both = torch.cat([qkv, torch.randn(9, 4 * head_dim, device=device)], 1)
    with_keys = rope_store(both, *pages, rows, **options)
    torch.testing.assert_close(with_keys, queries, atol=0, rtol=0)
    assert pages.any()


def test_no_tokens_are_no_work(device: torch.device) -> None:
    pages = torch.zeros(2, 1, PAGE_TOKENS, 2, 8, device=device)
    rows = torch.zeros(0, dtype=torch.int64, device=device)
    queries = rope_store(torch.zeros(0, 40, device=device), *pages, rows, rotations=None)
    assert queries.shape == (0, 1, 8)


def test_fp8_pages_are_as_in_torch_and_never_nan(device: torch.device) -> None:
    torch.manual_seed(0)
    qkv = (torch.randn(9, 4 * 16) * torch.logspace(-4, 3, 64)).to(device)
    pages = torch.zeros(2, NUM_PAGES, PAGE_TOKENS, 1, 16, device=device).to(torch.float8_e4m3fn)
    expected_pages = pages.clone()
    kv_rows = torch.randperm(NUM_PAGES * PAGE_TOKENS)[:9].to(device)
    angles = torch.randn(9, 8, device=device)
    rotations = Rotations(angles.cos(), angles.sin())
    for call, (keys, values) in ((reference, expected_pages), (rope_store, pages)):
        call(qkv, keys, values, kv_rows, rotations=rotations, kv_scales=(0.25, 1.5))
    torch.testing.assert_close(pages.float(), expected_pages.float(), atol=0, rtol=0.13)  # a step
    assert pages.float().abs().max() == 448
