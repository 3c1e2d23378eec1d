"""A product is torch's, and a row of it has the same bits wherever it stands."""

from itertools import product

import pytest
import torch
from gpu_tests import first_of

from headrace.engine_proc.worker.cuda.kernels.linear import (
    ENOUGH_PROGRAMS,
    SOME_SHARED,
    busiest_bytes,
    linear,
    part_terms,
    reference,
    tile_of,
)
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import new_turns

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@pytest.mark.parametrize(
    ("rows", "columns", "terms"),
    [(0, 5, 8), (1, 70, 3), (5, 64, 64), (66, 17, 130), (1030, 130, 5)],
)
@pytest.mark.parametrize(
    ("has_bias", "dtype"),
    [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16), (False, torch.float16)],
)
def test_products_are_those_of_torch(
    rows: int, columns: int, terms: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, terms).to(device, dtype)
    weight = torch.randn(columns, terms).to(device, dtype)
    bias = torch.randn(columns).to(device, dtype) if has_bias else None
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(linear(x, weight, bias), reference(x, weight, bias), **tolerance)


def test_a_row_has_the_same_bits_in_every_place(device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(70, 100, device=device), torch.randn(20, 100, device=device)
    out = linear(x, weight)
    for part in (slice(69, 70), slice(13, 24), slice(5, 69)):
        torch.testing.assert_close(linear(x[part], weight), out[part], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", first_of(1, [torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("terms", first_of(1, [600, 70]))  # in three parts, and in one
def test_tiles_of_any_size_shared_or_not_give_the_same_bits(
    dtype: torch.dtype, terms: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = torch.randn(280, terms).to(device, dtype)
    weight, bias = torch.randn(70, terms).to(device, dtype), torch.randn(70).to(device, dtype)
    turns = new_turns(ENOUGH_PROGRAMS, device)
    out = linear(x, weight, bias)
    for part in (slice(0, 280), slice(7, 107), slice(279, 280)):
        torch.testing.assert_close(linear(x[part], weight, bias), out[part], atol=0, rtol=0)
        shared = linear(x[part], weight, bias, turns)
        torch.testing.assert_close(shared, out[part], atol=0, rtol=0)
        assert not turns.any()


@pytest.mark.parametrize(
    ("columns", "terms", "num_parts"),
    [(1536, 8960, 6), (1536, 1536, 6), (2048, 1536, 5), (17920, 1536, 1), (9, 300, 2), (9, 9, 1)],
)
def test_parts_follow_from_the_matrix(columns: int, terms: int, num_parts: int) -> None:
    assert -(-terms // part_terms(columns, terms)) == num_parts
    tiles = -(-columns // 64)
    assert tiles * num_parts >= ENOUGH_PROGRAMS or part_terms(columns, terms) == 256


def test_many_rows_have_larger_tiles(device: torch.device) -> None:
    widest = 4 if device.type == "cpu" else 8
    in_one, in_parts, in_large_parts = (17920, 1536), (1536, 8960), (3584, 18944)
    for shape, areas in (
        (in_one, [1, 4, widest]),
        (in_parts, [1, 1, 4]),
        (in_large_parts, [1, 4, 4]),
    ):
        tiles = [tile_of(rows, *shape, torch.bfloat16) for rows in (1, 65, 257)]
        assert [tile.rows * tile.columns // 4096 for tile in tiles] == areas


@pytest.mark.parametrize(
    ("name", "shape", "num_rows", "before", "now"),
    [
        ("o of Qwen2.5-1.5B, 64 by 64", (1536, 1536), 256, 0.51, 0.51),
        ("q of Qwen2.5-7B", (3584, 3584), 256, 1.84, 1.57),
        ("down of Qwen2.5-7B", (3584, 18944), 256, 9.70, 6.82),
        ("down of Qwen2.5-7B", (3584, 18944), 80, 4.96, 3.51),
        ("down of Llama 3 8B", (4096, 14336), 128, 3.78, 2.72),
    ],
)
def test_a_processor_loads_less_of_large_matrices(
    name: str, shape: tuple[int, int], num_rows: int, before: float, now: float
) -> None:
    tile = tile_of(num_rows, *shape, torch.bfloat16)
    megabytes = [busiest_bytes(each, num_rows, *shape) / 1e6 for each in (SOME_SHARED, tile)]
    assert megabytes == pytest.approx([before, now], abs=0.01), name


def test_no_number_of_rows_has_a_processor_load_much_more() -> None:
    num_large = 0
    for columns, terms in product(range(512, 8192, 256), range(1024, 16384, 512)):
        if part_terms(columns, terms) >= terms:
            continue
        tile = tile_of(256, columns, terms, torch.bfloat16)
        assert {tile_of(n, columns, terms, torch.bfloat16) for n in (65, 128, 200)} == {tile}
        num_large += tile != SOME_SHARED
        for num_rows in (65, 128, 129, 192, 193, 256):
            most = busiest_bytes(SOME_SHARED, num_rows, columns, terms)
            assert busiest_bytes(tile, num_rows, columns, terms) <= 1.1 * most
    assert num_large > 500


@pytest.mark.parametrize("terms", [72, 600])  # in one part, and in three
@pytest.mark.parametrize("rows", first_of(1, [66, 280]))
def test_both_ways_to_load_a_tile_give_the_same_bits(
    rows: int, terms: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, terms).to(device, torch.bfloat16)
    weight = torch.randn(72, terms).to(device, torch.bfloat16)
    turns = new_turns(ENOUGH_PROGRAMS, device)
    is_asked = []
    monkeypatch.setattr("headrace.engine_proc.worker.cuda.kernels.linear.has_tma", is_asked.append)
    loaded = [linear(x, weight, None, turns)]
    assert is_asked
    monkeypatch.undo()
    loaded.append(linear(x, weight, None, turns))
    torch.testing.assert_close(*loaded, atol=0, rtol=0)
    ragged = torch.zeros(rows, terms + 1).to(x)[:, 1:].copy_(x)  # rows begin anywhere
    torch.testing.assert_close(linear(ragged, weight, None, turns), loaded[0], atol=0, rtol=0)
