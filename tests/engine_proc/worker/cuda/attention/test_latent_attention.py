"""Attention over latents is right for any mix of tokens, and no batch mate changes a bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.attention.latent_attention import attend_latents, reference
from headrace.engine_proc.worker.cuda.attention.tile_schedule import Stretches, Tiling

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
PAGE_TOKENS, MAX_PAGES, NUM_SLOTS = 16, 4, 5
SMALL = Tiling(rows=16, keys=16, split_keys=32, enough_programs=24)  # in splits, side by side
SERIAL = replace(SMALL, enough_programs=0)
# Each sequence's slot, tokens computed before and tokens in the batch: a prompt, a token, nothing,
# a piece of a prompt.
MIXED = [(3, 0, 4), (0, 40, 1), (2, 9, 0), (1, 29, 5)]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads in several tiles": {"num_heads": 19},
    "odd sizes": {"num_heads": 3, "rank": 10, "rope_dim": 6},
    "bf16": {"dtype": torch.bfloat16},
    "fp8 pages": {"pages_dtype": torch.float8_e4m3fn, "kv_scale": 0.5},
}
Parts = list[tuple[int, int, int]]


class Case:
    """Random pages, and queries at their places."""

    def __init__(
        self,
        device: torch.device,
        num_heads: int = 4,
        rank: int = 24,
        rope_dim: int = 8,
        dtype: torch.dtype = torch.float32,
        pages_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        page = (NUM_SLOTS * MAX_PAGES, PAGE_TOKENS, 1, rank + rope_dim)
        self.rank = rank
        self.latents = torch.randn(page).to(device, pages_dtype or dtype)
        slots = (NUM_SLOTS, MAX_PAGES * PAGE_TOKENS, num_heads, rank + rope_dim)
        self.queries = torch.randn(slots).to(device, dtype)
        self.table = torch.randperm(page[0]).view(NUM_SLOTS, MAX_PAGES).int().to(device)
        self.options = {"scale": 0.2} | options

    def arguments(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor, Stretches]:
        slots, before, counts = (torch.tensor(column) for column in zip(*parts, strict=True))
        device = self.table.device
        stretches = Stretches(
            query_starts=torch.cat([torch.zeros(1), counts.cumsum(0)]).int().to(device),
            num_keys=(before + counts).int().to(device),
            page_table=self.table[slots],
        )
        q = torch.cat([self.queries[slot, a : a + count] for slot, a, count in parts])
        own, turned = q[..., : self.rank].contiguous(), q[..., self.rank :].contiguous()
        return own, turned, self.latents, stretches

    def attend(self, parts: Parts, tiling: Tiling = SMALL) -> Tensor:
        return attend_latents(*self.arguments(parts), tiling=tiling, **self.options)


@pytest.mark.parametrize("name", CASES)
def test_a_mixed_batch_is_as_in_torch(name: str, device: torch.device) -> None:
    case = Case(device, **CASES[name])
    expected = reference(*case.arguments(MIXED), **case.options)
    tolerance = TOLERANCES[case.queries.dtype]
    torch.testing.assert_close(case.attend(MIXED), expected, atol=tolerance, rtol=tolerance)


def test_no_batch_mate_and_no_cut_changes_a_bit(device: torch.device) -> None:
    case = Case(device)
    mixed = case.attend(MIXED)
    assert torch.equal(case.attend(MIXED, SERIAL), mixed)
    assert torch.equal(torch.cat([case.attend([part]) for part in MIXED]), mixed)
    cut = case.attend([(1, 29, 1)]), case.attend([(1, 30, 4)])
    assert torch.equal(torch.cat(cut), mixed[5:])


@pytest.mark.parametrize("tiling", [SMALL, SERIAL])
def test_row_without_keys_gets_zeros(tiling: Tiling, device: torch.device) -> None:
    case = Case(device)
    q, turned, latents, stretches = case.arguments([(0, 17, 2), (1, 0, 3)])
    stretches.num_keys[1] = 0
    attended = attend_latents(q, turned, latents, stretches, tiling=tiling, **case.options)
    assert torch.equal(attended[:2], case.attend([(0, 17, 2)], tiling))
    assert not attended[2:].any()


def test_what_lies_behind_the_keys_is_not_read(device: torch.device) -> None:
    case = Case(device)
    clean = case.attend([(0, 17, 2)])
    case.latents[int(case.table[0, 1]), 3:] = torch.nan
    assert torch.equal(case.attend([(0, 17, 2)]), clean)
    assert case.attend([(0, 5, 0)]).shape == (0, 4, 24)
