"""Attention is right for any mix of prompts and tokens, and no batch mate changes a bit."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from gpu_tests import first_of
from torch import Tensor

from headrace.engine_proc.worker.cuda.attention.latent_attention import latent_tiling
from headrace.engine_proc.worker.cuda.attention.paged_attention import attend, reference, tiling_of
from headrace.engine_proc.worker.cuda.attention.tile_schedule import Stretches, Tiling
from headrace.engine_proc.worker.cuda.kernels.gpu_requirements import has_tma, is_hopper
from headrace.engine_proc.worker.cuda.largest_step import fewest_sequences

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
PAGE_TOKENS, MAX_PAGES, NUM_SLOTS = 16, 4, 5
SMALL = Tiling(rows=16, keys=16, split_keys=32, enough_programs=24)  # in splits, side by side
# Each sequence's slot, tokens computed before and tokens in the batch: a prompt, a token, nothing,
# a piece of a prompt.
MIXED = [(3, 0, 4), (0, 40, 1), (2, 9, 0), (1, 29, 5)]
# Prompts with images, and the first and last position of each: within a split, and across two.
WITH_IMAGES = [(3, 0, 40), (0, 40, 1), (1, 9, 30)]
IMAGES = {3: [(2, 7), (20, 37)], 1: [(12, 34)]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head": {"num_heads": 1, "num_kv_heads": 1},
    "odd sizes": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 10},
    "window": {"window": 5},
    "window beyond a split": {"window": 36},
    "chunks": {"window": 6, "is_chunked": True},
    "chunks beyond a split": {"window": 36, "is_chunked": True, "sinks": True},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True, "window": 20},
    "more heads than rows": {"num_heads": 17, "num_kv_heads": 1, "head_dim": 8},
    "bf16": {"dtype": torch.bfloat16, "sinks": True, "softcap": 5.0},
    "fp16": {"dtype": torch.float16},
    "fp8 pages": {"kv_dtype": torch.float8_e4m3fn, "kv_scales": (0.5, 2.0), "sinks": True},
}


class Case:
    """Random pages, and queries at their places."""

    def __init__(
        self,
        device: torch.device,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        sinks: bool = False,
        max_pages: int = MAX_PAGES,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        page = (NUM_SLOTS * max_pages, PAGE_TOKENS, num_kv_heads, head_dim)
        self.keys, self.values = torch.randn(2, *page).to(device, kv_dtype or dtype)
        self.queries = torch.randn(NUM_SLOTS, max_pages * PAGE_TOKENS, num_heads, head_dim)
        self.queries = self.queries.to(device, dtype)
        self.table = torch.randperm(page[0]).view(NUM_SLOTS, max_pages).int().to(device)
        sink_scores = torch.randn(num_heads).to(device) if sinks else None
        self.options = {"scale": head_dim**-0.5, "sinks": sink_scores} | options

    def stretches(self, parts: list[tuple[int, int, int]]) -> Stretches:
        slots, before, counts = (torch.tensor(column) for column in zip(*parts, strict=True))
        device = self.table.device
        return Stretches(
            query_starts=torch.cat([torch.zeros(1), counts.cumsum(0)]).int().to(device),
            num_keys=(before + counts).int().to(device),
            page_table=self.table[slots],
        )

    def q(self, parts: list[tuple[int, int, int]]) -> Tensor:
        return torch.cat([self.queries[slot, a : a + count] for slot, a, count in parts])

    def last_seen(self, parts: list[tuple[int, int, int]]) -> Tensor:
        """Return the last position that each token sees: an image's tokens see all of it."""
        own = [(slot, at) for slot, a, count in parts for at in range(a, a + count)]
        seen = [
            next((last for first, last in IMAGES.get(slot, ()) if first <= at <= last), at)
            for slot, at in own
        ]
        return torch.tensor(seen, dtype=torch.int32, device=self.table.device)

    def attend(
        self, parts: list[tuple[int, int, int]], tiling: Tiling = SMALL, **more: Any
    ) -> Tensor:
        stretches, options = self.stretches(parts), self.options | more
        return attend(self.q(parts), self.keys, self.values, stretches, tiling=tiling, **options)


@pytest.mark.parametrize("name", CASES)
def test_a_mixed_batch_is_as_in_torch(name: str, device: torch.device) -> None:
    case = Case(device, **CASES[name])
    expected = reference(
        case.q(MIXED), case.keys, case.values, case.stretches(MIXED), **case.options
    )
    tolerance = TOLERANCES[case.queries.dtype]
    torch.testing.assert_close(case.attend(MIXED), expected, atol=tolerance, rtol=tolerance)


def test_no_batch_mate_and_no_cut_changes_a_bit(device: torch.device) -> None:
    case = Case(device, num_heads=2, num_kv_heads=1, sinks=True, window=36)
    mixed = case.attend(MIXED)
    serial = Tiling(SMALL.rows, SMALL.keys, SMALL.split_keys, enough_programs=0)
    torch.testing.assert_close(case.attend(MIXED, serial), mixed, atol=0, rtol=0)
    alone = torch.cat([case.attend([part]) for part in MIXED])
    torch.testing.assert_close(alone, mixed, atol=0, rtol=0)
    cut = case.attend([(1, 29, 1)]), case.attend([(1, 30, 4)])
    torch.testing.assert_close(torch.cat(cut), mixed[5:], atol=0, rtol=0)


@pytest.mark.parametrize(
    "options",
    first_of(2, [{"window": 36, "sinks": True}, {"dtype": torch.bfloat16}, {}, {"window": 5}]),
)
def test_tokens_of_an_image_see_each_other_as_in_torch(
    options: dict[str, Any], device: torch.device
) -> None:
    case = Case(device, num_heads=2, num_kv_heads=1, **options)
    seen = case.last_seen(WITH_IMAGES)
    expected = reference(
        case.q(WITH_IMAGES),
        case.keys,
        case.values,
        case.stretches(WITH_IMAGES),
        last_seen=seen,
        **case.options,
    )
    found, tolerance = case.attend(WITH_IMAGES, last_seen=seen), TOLERANCES[case.queries.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert (found != case.attend(WITH_IMAGES)).flatten(1).any(1).sum() > 30


@pytest.mark.parametrize("window", first_of(1, [20, None]))
def test_no_batch_mate_and_no_cut_changes_a_bit_of_an_image(
    window: int | None, device: torch.device
) -> None:
    case = Case(device, num_heads=2, num_kv_heads=1, window=window)
    seen = case.last_seen(WITH_IMAGES)
    mixed = case.attend(WITH_IMAGES, last_seen=seen)
    serial = replace(SMALL, enough_programs=0)
    torch.testing.assert_close(
        case.attend(WITH_IMAGES, serial, last_seen=seen), mixed, atol=0, rtol=0
    )
    cuts = [(3, 0, 9), (3, 9, 11), (3, 20, 20), (0, 40, 1), (1, 9, 26), (1, 35, 4)]
    alone = [case.attend([part], last_seen=case.last_seen([part])) for part in cuts]
    torch.testing.assert_close(torch.cat(alone), mixed, atol=0, rtol=0)
    own = torch.cat([torch.arange(a, a + count) for _, a, count in WITH_IMAGES]).to(seen)
    torch.testing.assert_close(
        mixed[seen == own], case.attend(WITH_IMAGES)[seen == own], atol=0, rtol=0
    )


def test_what_lies_behind_the_keys_is_not_read(device: torch.device) -> None:
    case = Case(device)
    clean = case.attend([(0, 17, 2)])
    page = int(case.table[0, 1])
    case.keys[page, 3:], case.values[page, 3:] = torch.nan, torch.nan
    torch.testing.assert_close(case.attend([(0, 17, 2)]), clean, atol=0, rtol=0)


@pytest.mark.parametrize("enough_programs", [0, 24])
@pytest.mark.parametrize("sinks", first_of(1, [True, False]))
def test_row_without_keys_gets_zeros(
    enough_programs: int, sinks: bool, device: torch.device
) -> None:
    case = Case(device, sinks=sinks)
    whole = case.stretches([(0, 17, 2), (1, 0, 3)])
    whole.num_keys[1] = 0
    tiling = Tiling(16, 16, 16, enough_programs)
    q = case.q([(0, 17, 2), (1, 0, 3)])
    attended = attend(q, case.keys, case.values, whole, tiling=tiling, **case.options)
    alone = case.attend([(0, 17, 2)], tiling)
    torch.testing.assert_close(attended[:2], alone, atol=0, rtol=0)
    assert not attended[2:].any()


def test_no_tokens_are_no_work(device: torch.device) -> None:
    assert Case(device).attend([(0, 5, 0)]).shape == (0, 4, 16)


def test_programs_take_turns_with_splits(device: torch.device) -> None:
    case = Case(device, sinks=True)
    parts = [(3, 50, 2), (0, 0, 3)]
    tilings = [Tiling(16, 16, 16, enough_programs=enough) for enough in (0, 4, 24)]
    # 1, 2 or 4 programs for a tile that has 4 splits
    serial, shared, parallel = (case.attend(parts, tiling) for tiling in tilings)
    torch.testing.assert_close(shared, serial, atol=0, rtol=0)
    torch.testing.assert_close(parallel, serial, atol=0, rtol=0)


def test_wide_tiles_have_the_same_bits(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("on GPUs tiles so small may have other bits")
    narrow, prompts = replace(SMALL, enough_programs=4), [(3, 20, 17), (0, 0, 18)]
    case = Case(device, dtype=torch.bfloat16, head_dim=64)
    check_wide_tiles(case, prompts, narrow, group=2)


@pytest.mark.parametrize(
    ("capability", "rows"), [((8, 0), 64), ((8, 6), 32), ((8, 9), 32), ((9, 0), 64), ((12, 0), 32)]
)
def test_tiles_are_as_large_as_a_gpu_has_room_for(
    capability: tuple[int, int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processors share 99 KiB, and those of data centers' GPUs 163 or more."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda")
    assert tiling_of(256, torch.bfloat16, gpu).rows == rows
    assert tiling_of(128, torch.float32, gpu).rows == rows
    assert tiling_of(128, torch.bfloat16, gpu).rows == 64
    wide_rows = 128 if capability == (9, 0) else None  # tiles of prompts, on a Hopper alone
    assert tiling_of(128, torch.bfloat16, gpu).wide_rows == wide_rows
    assert tiling_of(256, torch.bfloat16, gpu).wide_rows is None
    assert tiling_of(128, torch.float32, gpu).wide_rows is None
    has_tma.cache_clear()
    assert latent_tiling(gpu).rows == (64 if capability == (9, 0) else 32)
    has_tma.cache_clear()


@pytest.mark.parametrize("window", [None, 300])
def test_wide_tiles_of_a_hopper_have_the_same_bits(
    window: int | None, device: torch.device
) -> None:
    """Three splits of keys, heads that fill no tile, and a prompt in two pieces."""
    if not is_hopper(device):
        pytest.skip("only a Hopper has such tiles")
    heads = {"num_heads": 14, "num_kv_heads": 2, "head_dim": 128, "max_pages": 48}
    case = Case(device, dtype=torch.bfloat16, window=window, **heads)
    whole = check_wide_tiles(case, [(3, 0, 700)], Tiling(enough_programs=1), group=7)
    pieces = [(3, 0, 333)], [(3, 333, 367)]
    cut = [check_wide_tiles(case, piece, Tiling(enough_programs=1), group=7) for piece in pieces]
    torch.testing.assert_close(torch.cat(cut), whole, atol=0, rtol=0)


def check_wide_tiles(
    case: Case, prompts: list[tuple[int, int, int]], narrow: Tiling, group: int
) -> Tensor:
    """Return what tiles of either width give to prompts."""
    wide = replace(narrow, wide_rows=2 * narrow.rows)
    num_tokens = sum(count for _, _, count in prompts)
    assert wide.rows_for(group, 2, num_tokens, len(prompts)) == wide.wide_rows
    expected = case.attend(prompts, narrow)
    torch.testing.assert_close(case.attend(prompts, wide), expected, atol=0, rtol=0)
    return expected


@pytest.mark.parametrize(
    ("num_tokens", "num_sequences", "rows"),
    [(2048, 1, 128), (2048, 64, 128), (2048, 65, 64), (1024, 1, 64), (64, 1, 64)],
)
def test_prompts_that_fill_a_gpu_have_wide_tiles(
    num_tokens: int, num_sequences: int, rows: int
) -> None:
    tiling = Tiling(wide_rows=128, enough_programs=264)
    assert tiling.rows_for(4, 8, num_tokens, num_sequences) == rows
    assert replace(tiling, wide_rows=None).rows_for(4, 8, num_tokens, num_sequences) == 64


def test_a_largest_step_has_wide_tiles_if_any_step_has() -> None:
    """Else the first request with such a step would wait for a compiler."""
    tiling = Tiling(rows=4, wide_rows=8, enough_programs=6)
    for most, length, sequences in product(range(1, 40), range(1, 14), (1, 2, 3, 9)):
        is_wide = [
            tiling.rows_for(1, 2, tokens, number) == 8
            for number in range(1, sequences + 1)
            for tokens in range(number, min(most, number * length) + 1)
        ]
        warmed = [
            tiling.rows_for(1, 2, min(most, number * length), number) == 8
            for number in fewest_sequences(sequences, most, length)
        ]
        assert any(warmed) == any(is_wide), (most, length, sequences)


@pytest.mark.parametrize(("group", "num_rows"), [(1, 64), (7, 64), (64, 64), (71, 128)])
def test_a_tile_has_all_heads_of_a_token(group: int, num_rows: int) -> None:
    assert Tiling().num_rows(group) == num_rows
