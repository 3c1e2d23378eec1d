"""An engine whose workers copy pages between a GPU and its host tier."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_rig import Rig, Sevens, generate

from headrace.board.fields import EngineField, KvStoreField
from headrace.ipc.messages import request_id
from headrace.ipc.worker_messages import CopyPages, WorkerReady

READY = WorkerReady(num_pages=16, page_tokens=16, page_bytes=100, num_host_pages=8)
PROMPT = tuple(range(1, 6)) * 8  # two full pages
HOST, OTHER = b"host" * 4, b"next" * 4  # ids of memory


class Copying(Sevens):
    """Workers that copy when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.cache_id = HOST
        self.asked: list[CopyPages] = []
        self.num_made = 0

    def copy_pages(self, copies: CopyPages) -> None:
        self.asked.append(copies)

    def copied_pages(self) -> Iterator[float]:
        while self.num_made:
            self.num_made -= 1
            yield 0.5


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, ready=READY)
    rig.workers = Copying()
    rig.host.reset(HOST)
    yield rig
    rig.close()


def run(rig: Rig, number: int) -> int:
    """Run a prompt to its end, two tokens; return how many of its tokens were cached."""
    rig.take(generate(request_id(0, number)), prompt=PROMPT)
    rig.turn()
    rig.turn()
    return sum(sum(rig.heard()[0].cached.values()) for _ in range(2))


def copied(rig: Rig) -> list[bool]:
    """Have all copies made that were asked for; return whether each went to the host."""
    workers = rig.workers
    assert isinstance(workers, Copying)
    asked, workers.asked = workers.asked, []
    workers.num_made = len(asked)
    rig.turn()
    return [copies.to_host for copies in asked]


def test_pages_come_back_after_the_death_of_workers(rig: Rig) -> None:
    assert run(rig, 1) == 0
    rig.turn()
    assert rig.engine._is_busy_beside, "their copies are awaited"
    assert copied(rig) == [True] and not rig.engine._is_busy_beside
    rig.workers.lives = 0
    rig.turn()
    rig.workers = Copying()
    rig.turn()
    assert rig.slot[EngineField.RECOVERED_PAGES] == 2
    rig.take(generate(request_id(0, 2)), prompt=PROMPT)
    assert rig.turn() == [], "the sequence waits for its pages"
    assert rig.turn() == [] and copied(rig) == [False]
    slot = rig.board.slot("kv_store")
    assert slot[KvStoreField.FOUND] == slot[KvStoreField.COPIED_OUT] == 2
    assert slot[KvStoreField.COPY_IN_NS] == 500_000_000
    assert slot[KvStoreField.USED_BYTES] == 200 and slot[KvStoreField.TOTAL_BYTES] == 800
    rig.turn()
    output, _ = rig.heard()
    assert sum(output.cached.values()) == 32


class Asked:
    """A KV store's client that notes whether it may ask the store."""

    def __init__(self) -> None:
        self.may_ask: list[bool] = []

    def poll(self, may_ask: bool) -> None:
        self.may_ask.append(may_ask)

    def settle(self) -> None: ...


def test_a_store_fetches_nothing_while_new_workers_load(rig: Rig) -> None:
    """They may have other memory, whose pages are then all forgotten."""
    asked: Any = Asked()
    rig.engine._store = asked
    rig.engine.poll_store()
    rig.workers.lives = 0
    rig.turn()
    rig.engine.poll_store()
    rig.workers = Copying()
    rig.turn()
    rig.engine.poll_store()
    assert asked.may_ask == [True, False, True]


def test_copies_in_flight_at_a_death_are_not_counted(rig: Rig) -> None:
    run(rig, 1)
    rig.turn()
    rig.workers.lives = 0
    rig.turn()
    rig.workers = Copying()
    rig.turn()
    assert rig.host.num_cached == 0 and run(rig, 2) == 0


def test_the_pages_of_another_host_memory_are_not_found(rig: Rig) -> None:
    run(rig, 1)
    rig.turn()
    copied(rig)
    rig.workers.lives = 0
    rig.turn()
    rig.workers = Copying()
    rig.workers.cache_id = OTHER
    rig.turn()
    assert rig.host.cache_id == OTHER and run(rig, 2) == 0
