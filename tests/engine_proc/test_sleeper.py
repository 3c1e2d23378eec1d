"""Sleep of an engine: when it falls asleep and wakes, and what it forgets."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_rig import FIRST, Rig, generate

from headrace.board.board import Board, Seat
from headrace.board.fields import EngineField
from headrace.board.replicas import wish_sleep
from headrace.engine_proc import engine_core
from headrace.engine_proc.shm.cache_memory import CacheMemory
from headrace.engine_proc.sleeper import MIB, Sleeper
from headrace.ipc.messages import Abort, request_id

PAGE = tuple(range(1, 17))  # the tokens of a full page
NUM_BYTES = MIB


class Store:
    """A client of a KV store."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_keeping = self.has_kept_all = False

    def keep_all(self) -> None:
        self.is_keeping, self.num_asked = True, self.num_asked + 1

    def stop_keeping(self) -> None:
        self.is_keeping = False

    def finish(self) -> None:
        """Have all been kept."""
        self.is_keeping, self.has_kept_all = False, True


class Bed:
    """An engine that may sleep, the memory of its pages, and an operator's frontend."""

    def __init__(self, run_dir: Path, store: Any = None) -> None:
        self.rig = Rig(run_dir)
        self.board = Board.create([Seat("engine", 0), Seat("frontend", 0)])
        self.fd = os.memfd_create("pages")
        self.memory = CacheMemory(self.fd, NUM_BYTES, b"m" * 16)
        self.num_rests = 0
        workers: Any = SimpleNamespace(cache_id=bytes(16), rest=self._rest)
        context: Any = SimpleNamespace(board=self.board, slot=self.rig.slot)
        self.sleeper = Sleeper(context, self.rig.scheduler, workers, store, [self.fd])

    def _rest(self) -> None:
        self.num_rests += 1

    def wish(self, sleeps: bool) -> None:
        """Note what operators want."""
        wish_sleep(self.board.slot("frontend"), 0, sleeps)

    def fill(self) -> None:
        """Have a prompt cached, and memory taken for it."""
        self.rig.take(generate(FIRST), prompt=PAGE)
        self.rig.step()
        self.rig.take(Abort(FIRST))
        os.pwrite(self.fd, b"x" * NUM_BYTES, 0)
        assert self.rig.scheduler._pool.num_cached == 1

    def idle(self) -> None:
        """Let the engine find that it has nothing to do."""
        self.rig.engine.receive(self.rig.inbox)
        self.sleeper.look()

    @property
    def is_asleep(self) -> bool:
        return bool(self.rig.slot[EngineField.IS_ASLEEP])

    @property
    def num_bytes(self) -> int:
        return 512 * os.fstat(self.fd).st_blocks

    def close(self) -> None:
        self.rig.close()
        self.memory.close()
        os.close(self.fd)
        os.close(self.board.fd)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an idle engine look around at once."""
    monkeypatch.setattr(engine_core, "IDLE_MS", 1)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    found = Bed(tmp_path)
    yield found
    found.close()


def test_an_idle_engine_sleeps_when_operators_want_that(bed: Bed) -> None:
    bed.fill()
    assert bed.num_bytes >= NUM_BYTES
    bed.idle()
    assert not bed.is_asleep
    bed.wish(sleeps=True)
    bed.idle()
    assert (bed.is_asleep, bed.num_rests) == (True, 1)
    assert bed.num_bytes < NUM_BYTES
    assert bed.rig.scheduler._pool.num_cached == 0, "no page is found whose memory is gone"


def test_an_engine_with_requests_sleeps_when_they_have_ended(bed: Bed) -> None:
    bed.rig.take(generate(FIRST))
    bed.wish(sleeps=True)
    bed.sleeper.look()
    assert not bed.is_asleep
    bed.rig.take(Abort(FIRST))
    bed.idle()
    assert bed.is_asleep


def test_a_request_wakes_an_engine(bed: Bed) -> None:
    bed.wish(sleeps=True)
    bed.idle()
    assert bed.is_asleep
    bed.rig.take(generate(request_id(0, 2)), prompt=PAGE)
    bed.sleeper.look()
    assert not bed.is_asleep
    assert bed.rig.step()
    bed.rig.take(Abort(request_id(0, 2)))
    bed.idle()
    assert not bed.is_asleep, "it sleeps once for each time that it is asked to"


def test_an_operator_wakes_an_engine(bed: Bed) -> None:
    bed.wish(sleeps=True)
    bed.idle()
    bed.wish(sleeps=False)
    bed.idle()
    assert not bed.is_asleep


def test_an_engine_sleeps_once_its_store_has_kept_all(tmp_path: Path) -> None:
    store = Store()
    bed = Bed(tmp_path, store)
    bed.wish(sleeps=True)
    for _ in range(2):
        bed.idle()
        assert (bed.is_asleep, store.num_asked) == (False, 1)
    store.finish()
    bed.idle()
    assert bed.is_asleep
    bed.close()


def test_a_request_stops_what_a_store_keeps_for_sleep(tmp_path: Path) -> None:
    store = Store()
    bed = Bed(tmp_path, store)
    bed.wish(sleeps=True)
    bed.idle()
    assert store.is_keeping
    bed.rig.take(generate(FIRST))
    bed.sleeper.look()
    assert not store.is_keeping
    bed.rig.take(Abort(FIRST))
    bed.idle()
    assert (bed.is_asleep, store.num_asked) == (False, 2), "it is still to sleep"
    bed.close()


def test_an_engine_whose_pages_are_its_workers_never_sleeps(bed: Bed) -> None:
    context: Any = SimpleNamespace(board=bed.board, slot=bed.rig.slot)
    workers: Any = SimpleNamespace(cache_id=b"", rest=bed._rest)
    sleeper = Sleeper(context, bed.rig.scheduler, workers, None, [])
    assert bed.rig.slot[EngineField.CAN_SLEEP] == 0
    bed.wish(sleeps=True)
    sleeper.look()
    assert (bed.is_asleep, bed.num_rests) == (False, 0)


def test_an_engine_that_sleeps_gives_nothing_back_again(bed: Bed) -> None:
    for sleeps in (True, True, False, True):
        bed.wish(sleeps)
        bed.idle()
        assert (bed.is_asleep, bed.num_rests) == (sleeps, 1), "workers may be stopped"
    bed.rig.take(generate(FIRST))
    bed.sleeper.look()
    bed.rig.take(Abort(FIRST))
    bed.wish(sleeps=True)
    bed.idle()
    assert (bed.is_asleep, bed.num_rests) == (True, 2)


@pytest.mark.parametrize("has_kept_all", [False, True])
def test_sleep_tells_what_it_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_kept_all: bool
) -> None:
    store = Store()
    store.keep_all = lambda: None  # type: ignore[method-assign]
    store.has_kept_all = has_kept_all
    bed = Bed(tmp_path, store)
    os.pwrite(bed.fd, bytes(MIB), 0)
    bed.wish(sleeps=True)
    with caplog.at_level("INFO"):
        bed.idle()
    assert ("has not kept all" in caplog.text) is not has_kept_all
    assert "asleep: 1 MiB of pages are given back" in caplog.text
    bed.close()
