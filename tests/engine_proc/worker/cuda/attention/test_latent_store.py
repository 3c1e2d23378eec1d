"""Latents are normed, keys and queries rotated, and pages hold what they are to."""

import pytest
import torch

from headrace.engine_proc.worker.cuda.attention.latent_store import latent_store, reference
from headrace.engine_proc.worker.cuda.kernels.rope_kv_store import Rotations

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PAGE_TOKENS, NUM_PAGES, NUM_TOKENS = 16, 3, 11


@pytest.mark.parametrize(
    ("num_heads", "rank", "rope_dim", "interleaved", "dtype", "pages_dtype"),
    [
        (3, 20, 12, True, torch.float32, torch.float32),
        (1, 16, 8, False, torch.bfloat16, torch.bfloat16),
        (2, 32, 16, None, torch.float32, torch.float32),
        (2, 32, 16, True, torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_pages_and_queries_are_as_in_torch(
    num_heads: int,
    rank: int,
    rope_dim: int,
    interleaved: bool | None,
    dtype: torch.dtype,
    pages_dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    q = torch.randn(NUM_TOKENS, num_heads, rope_dim + 5).to(device, dtype)
    kv = torch.randn(NUM_TOKENS, 7 + rank + rope_dim).to(device, dtype)[:, 7:]
    latents = torch.randn(NUM_PAGES, PAGE_TOKENS, 1, rank + rope_dim).to(device, pages_dtype)
    expected_latents = latents.clone()
    kv_rows = torch.randperm(NUM_PAGES * PAGE_TOKENS)[:NUM_TOKENS].to(device)
    kv_rows[[2, 10]] = -1
    rotations = None
    if interleaved is not None:
        angles = torch.randn(NUM_TOKENS, rope_dim // 2, device=device) * 5
        rotations = Rotations(angles.cos(), angles.sin(), interleaved)
    options = {
        "rotations": rotations,
        "weight": torch.randn(rank, device=device),
        "eps": 1e-5,
        "kv_scale": 0.5 if pages_dtype == torch.float8_e4m3fn else 1.0,
    }
    turned = latent_store(q, kv, latents, kv_rows, **options)
    expected = reference(q, kv, expected_latents, kv_rows, **options)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(turned, expected, atol=tolerance, rtol=tolerance)
    if pages_dtype == torch.float8_e4m3fn:  # some may be rounded the other way
        tolerance = 0.13
    torch.testing.assert_close(
        latents.float(), expected_latents.float(), atol=tolerance, rtol=tolerance
    )
    assert latent_store(q[:0], kv[:0], latents, kv_rows[:0], **options).shape == turned[:0].shape
