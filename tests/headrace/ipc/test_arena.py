"""The owner of a region places tensors; a reader detects stale ones; counts of other generations
are ignored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.ipc.arena import PAGE_BYTES, Arena, Region, Stale
from headrace.ipc.messages import Tensor

REGION_BYTES = 8 * PAGE_BYTES


@pytest.fixture
def arena() -> Arena:
    return Arena.create(2, REGION_BYTES)


def put(region: Region, data: bytes) -> Tensor:
    """Write a tensor that there is room for, and send it."""
    place = region.allocate(len(data))
    assert place is not None
    region.view(place)[: len(data)] = data
    region.send(place)
    return Tensor(place, region.generation(place), "u1", [len(data)])


def test_what_is_written_is_read_through_another_map(arena: Arena) -> None:
    reader = Arena(arena.fd, 2)
    first, second = put(arena.region(0), b"abc"), put(arena.region(1), b"x" * REGION_BYTES)
    assert bytes(reader.read(first)) == b"abc"
    assert bytes(reader.read(second)) == b"x" * REGION_BYTES
    assert bytes(reader.read(first)) == b"abc"
    with pytest.raises(TypeError, match="read-only"):
        reader.read(first)[0] = 0


def test_a_region_gives_no_more_than_it_has(arena: Arena) -> None:
    region = arena.region(0)
    assert region.max_bytes >= REGION_BYTES
    places = [region.allocate(PAGE_BYTES) for _ in range(region.max_bytes // PAGE_BYTES)]
    assert len(set(places)) == len(places) and None not in places
    assert region.num_bytes == region.max_bytes
    assert region.allocate(1) is None
    for place in (*places[1::2], *places[::2]):  # the holes between are joined
        assert place is not None
        region.free(place)
    assert region.num_bytes == 0
    assert region.allocate(region.max_bytes) == places[0]


def test_there_is_a_place_for_all_or_for_none(arena: Arena) -> None:
    region = arena.region(0)
    assert region.allocate_all([1, PAGE_BYTES, region.max_bytes]) is None
    assert region.num_bytes == 0
    places = region.allocate_all([1, PAGE_BYTES + 1])
    assert places is not None
    assert region.num_bytes == 3 * PAGE_BYTES
    for place in places:
        region.free(place)
    assert region.num_bytes == 0


def test_an_engine_says_when_it_is_done_with_each_that_was_sent(arena: Arena) -> None:
    region, engine = arena.region(0), Arena(arena.fd, 2)
    tensor = put(region, b"abc")
    region.send(tensor.offset)
    assert region.num_sent(tensor.offset) == 2
    engine.release(tensor)
    assert region.num_sent(tensor.offset) == 1
    engine.release(tensor)
    assert region.num_sent(tensor.offset) == 0


def test_freed_place_is_stale_for_its_old_owner(arena: Arena) -> None:
    region = arena.region(0)
    first, second = put(region, b"a" * PAGE_BYTES), put(region, b"b" * PAGE_BYTES)
    region.free(first.offset)
    region.free(second.offset)
    both = put(region, b"c" * 2 * PAGE_BYTES)
    assert both.offset == first.offset
    for stale in (first, second):
        with pytest.raises(Stale):
            arena.read(stale)
        arena.release(stale)
    assert arena.holds(both) and region.num_sent(both.offset) == 1


def test_successor_starts_with_an_empty_distrusted_region(
    arena: Arena,
) -> None:
    before, neighbor = put(arena.region(0), b"abc"), put(arena.region(1), b"xyz")
    region = arena.region(0)
    assert region.num_bytes == 0
    assert not arena.holds(before)
    after = put(region, b"def")
    assert after.offset == before.offset and after.generation != before.generation
    arena.release(before)
    assert region.num_sent(after.offset) == 1
    assert bytes(arena.read(neighbor)) == b"xyz"


def test_what_a_dead_engine_had_is_not_waited_for(arena: Arena) -> None:
    region = arena.region(0)
    before = put(region, b"abc")
    region.forget_sent()
    assert region.num_sent(before.offset) == 0
    region.send(before.offset)
    now = Tensor(before.offset, region.generation(before.offset), "u1", [3])
    arena.release(before)  # the next engine has found it in its inbox
    assert region.num_sent(now.offset) == 1
    assert bytes(arena.read(now)) == b"abc" and not arena.holds(before)
    arena.release(now)
    assert region.num_sent(now.offset) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3 * PAGE_BYTES)), max_size=60))
def test_places_never_overlap_and_all_comes_back(steps: list[tuple[int, int]]) -> None:
    arena = Arena.create(1, 16 * PAGE_BYTES)
    region = arena.region(0)
    held: dict[int, bytes] = {}
    for number, (which, size) in enumerate(steps):
        if which < 4 and held:
            region.free(list(held)[which % len(held)])
            del held[list(held)[which % len(held)]]
        elif (place := region.allocate(size)) is not None:
            held[place] = bytes([number + 1]) * size
            region.view(place)[:size] = held[place]
        assert all(region.view(p)[: len(data)] == data for p, data in held.items())
    for place in held:
        region.free(place)
    assert region.num_bytes == 0 and region.allocate(region.max_bytes) is not None
