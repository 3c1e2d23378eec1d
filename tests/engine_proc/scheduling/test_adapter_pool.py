"""Adapters take turns in the workers: each runs in the end, and none leaves while it runs."""

import random

from headrace.engine_proc.scheduling.adapter_pool import MAX_DEATHS, MAX_LOADING, AdapterPool
from headrace.engine_proc.sequence.pooled_adapter import NO_SLOT, PooledAdapter
from headrace.ipc.messages import AdapterSource


def source(name: str) -> AdapterSource:
    return AdapterSource(name, f"/{name}", name.encode())


def load_all(pool: AdapterPool, running: list[PooledAdapter] | None = None) -> None:
    """Load what the pool asks for, until it asks for nothing."""
    while begun := pool.arrange(running or []):
        for adapter in begun:
            pool.take_loaded(adapter.slot)


def test_adapter_is_open_when_it_is_loaded() -> None:
    pool = AdapterPool(max_running=2, max_loaded=2)
    adapter = pool.enter(source("a"))
    assert not adapter.is_open
    assert pool.arrange([]) == [adapter]
    assert adapter.is_loading
    assert pool.arrange([]) == []
    pool.take_loaded(adapter.slot)
    assert adapter.is_open


def test_pool_loads_few_at_a_time() -> None:
    pool = AdapterPool(max_running=8, max_loaded=8)
    for name in "abcdef":
        pool.enter(source(name))
    assert len(pool.arrange([])) == MAX_LOADING


def test_loaded_adapter_is_found_again_and_the_oldest_leaves() -> None:
    pool = AdapterPool(max_running=1, max_loaded=2)
    for name in "ab":
        adapter = pool.enter(source(name))
        load_all(pool)
        pool.leave(adapter)
    again = pool.enter(source("a"))
    assert again.is_loaded
    load_all(pool)
    pool.leave(again)
    other = pool.enter(source("c"))
    load_all(pool)
    assert other.is_open
    assert pool.enter(source("a")).is_loaded
    assert not pool.enter(source("b")).is_loaded


def test_adapter_closes_for_one_that_waits() -> None:
    pool = AdapterPool(max_running=1, max_loaded=1)
    first = pool.enter(source("a"))
    load_all(pool)
    second = pool.enter(source("b"))
    pool.arrange([])
    assert first.is_open, "it has run nothing yet"
    pool.arrange([first])
    assert not first.is_open
    assert first.is_loaded, "its running sequence goes on"
    load_all(pool)
    assert second.is_open
    assert first.slot == NO_SLOT


def test_flood_of_one_adapter_ends_for_another() -> None:
    pool = AdapterPool(max_running=1, max_loaded=1)
    for _ in range(100):
        flooding = pool.enter(source("a"))
    load_all(pool)
    other = pool.enter(source("b"))
    pool.arrange([flooding])  # some of the flood run; none begins after them
    assert not flooding.is_open
    pool.leave(flooding)
    load_all(pool, running=[])
    assert other.is_open
    pool.arrange([other])
    pool.leave(other)
    load_all(pool)
    assert flooding.is_open, "what is left of the flood runs after it"


def test_every_adapter_runs_in_its_turn() -> None:
    rng = random.Random(0)
    pool = AdapterPool(max_running=2, max_loaded=3)
    waiting = [pool.enter(source(f"{rng.randrange(12)}")) for _ in range(200)]
    running: list[PooledAdapter] = []
    for _ in range(2000):
        for adapter in pool.arrange(running):
            pool.take_loaded(adapter.slot)
        ready = [adapter for adapter in waiting if adapter.is_open]
        for adapter in ready[: rng.randrange(4)]:
            waiting.remove(adapter)
            running.append(adapter)
        assert len(set(running)) <= 2
        assert all(adapter.is_loaded for adapter in running)
        assert pool.num_loaded <= 3
        for adapter in rng.sample(running, rng.randrange(len(running) + 1)):
            running.remove(adapter)
            pool.leave(adapter)
    assert not waiting


def test_lost_workers_get_adapters_again() -> None:
    pool = AdapterPool(max_running=2, max_loaded=2)
    adapter = pool.enter(source("a"))
    load_all(pool)
    assert pool.lose() == []
    assert not adapter.is_loaded
    assert pool.arrange([]) == [adapter]


def test_adapter_at_which_workers_die_is_given_up() -> None:
    pool = AdapterPool(max_running=2, max_loaded=2)
    adapter = pool.enter(source("a"))
    for _ in range(MAX_DEATHS - 1):
        pool.arrange([])
        assert pool.lose() == []
    pool.arrange([])
    assert pool.lose() == [adapter]


def test_failed_adapter_is_forgotten_with_its_sequences() -> None:
    pool = AdapterPool(max_running=1, max_loaded=1)
    adapter = pool.enter(source("a"))
    pool.arrange([])
    assert pool.take_failed(adapter.slot) is adapter
    pool.leave(adapter)
    assert pool.used == []
    other = pool.enter(source("b"))
    load_all(pool)
    assert other.is_open
