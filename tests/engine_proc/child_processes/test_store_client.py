"""What the engine asks its KV store for, one message at a time."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.process_configs import StoreTiers
from headrace.engine_proc.child_processes.store_client import PIECE_S, StoreClient
from headrace.ipc.prefix_index import PrefixIndex, create_prefix_index
from headrace.ipc.worker_messages import (
    CacheLayout,
    Drain,
    Drained,
    FromStore,
    Lookup,
    LookupResult,
    OpenStore,
    ToStore,
)
from headrace.supervision.restart_backoff import RestartBackoff


class Rig:
    """A client of a store that is played."""

    def __init__(self, numerics: str = "") -> None:
        self.sent: list[ToStore] = []
        self.answers: list[FromStore] = []
        self.lookups: list[Lookup] = []  # that sequences want
        self.client: Any = StoreClient.__new__(StoreClient)
        self.client._child = SimpleNamespace(
            send=self.sent.append,
            receive=lambda _wait_s: self.answers.pop() if self.answers else None,
            check=lambda: None,
            stop=lambda: None,
        )
        self.client._fetcher = SimpleNamespace(
            is_busy=False,
            look_at_clock=self._look,
            ask=lambda _answer: self.lookups.pop() if self.lookups else None,
            cancel=lambda: None,
        )
        self.client._context = SimpleNamespace(slot=SimpleNamespace(beat=lambda: None))
        self.client._clock, self.client._restarts = time.monotonic, RestartBackoff()
        self.client._is_ready, self.client._is_asked = True, False
        index_fd = create_prefix_index()
        self.index = PrefixIndex(index_fd)
        tiers = StoreTiers(index_fd=index_fd)
        self.client._config = SimpleNamespace(store_tiers=tiers)
        self.client._opening = OpenStore(CacheLayout(1, 0, [1], [0]), numerics)
        self.client.is_keeping = self.client.has_kept_all = False
        self.client._num_drains = self.num_looks = 0

    def _look(self) -> None:
        self.num_looks += 1

    def answer(self, *answers: FromStore) -> None:
        """Have the store answer, and the client look."""
        self.answers += answers
        self.client.poll()


def piece(number: int) -> Drain:
    return Drain(number, PIECE_S)


def test_a_store_keeps_all_that_is_cached_piece_by_piece() -> None:
    rig = Rig()
    rig.client.keep_all()
    for _ in range(2):
        rig.answer()
        assert (rig.client.is_keeping, rig.sent) == (True, [piece(1)]), "one at a time"
    rig.answer(Drained(1, is_all=False))
    assert (rig.client.is_busy, rig.sent) == (True, [piece(1)] * 2)
    rig.answer(Drained(1, is_all=True))
    assert (rig.client.is_keeping, rig.client.has_kept_all) == (False, True)
    assert rig.sent == [piece(1)] * 2


def test_what_sequences_wait_for_is_asked_first() -> None:
    rig = Rig()
    rig.client.keep_all()
    for answer in ((), (Drained(1, is_all=False),)):
        rig.lookups.append(Lookup(b"digest"))
        rig.answer(*answer)
        assert rig.sent[-1] == Lookup(b"digest")
        rig.answer(LookupResult(b"\0", b""))
        assert rig.sent[-1] == piece(1)


def test_waits_end_by_the_clock_while_a_store_is_at_work() -> None:
    rig = Rig()
    rig.client.keep_all()
    for number in range(1, 4):
        rig.answer()
        assert rig.num_looks == number
    assert rig.sent == [piece(1)]


def test_a_piece_of_before_is_not_all_that_is_cached_now() -> None:
    rig = Rig()
    rig.client.keep_all()
    rig.answer()
    rig.client.stop_keeping()
    rig.client.keep_all()
    rig.answer(Drained(1, is_all=True))
    assert (rig.client.is_keeping, rig.sent) == (True, [piece(1), piece(2)])
    rig.answer(Drained(2, is_all=True))
    assert rig.client.has_kept_all


def test_a_store_that_may_stop_is_asked_for_no_more_pieces() -> None:
    rig = Rig()
    rig.client.keep_all()
    rig.answer()
    rig.client.stop_keeping()
    rig.answer(Drained(1, is_all=False))
    assert (rig.client.is_keeping, rig.client.has_kept_all, rig.sent) == (False, False, [piece(1)])


def test_what_is_to_be_kept_is_asked_for_after_workers_have_died() -> None:
    rig = Rig()
    rig.client.keep_all()
    rig.answer()
    rig.answers.append(Drained(1, is_all=True))
    rig.client.settle()
    assert rig.client.is_keeping, "others have other pages"
    rig.answer()
    assert rig.sent == [piece(1)] * 2


def test_a_store_that_does_not_serve_keeps_nothing() -> None:
    rig = Rig()
    rig.client._is_ready = False
    rig.client.keep_all()
    assert (rig.client.is_keeping, rig.client.has_kept_all) == (False, False)


@pytest.mark.parametrize(("numerics", "num_left"), [("", 0), ("bf16", 1)])
def test_a_store_that_ends_takes_its_pages_from_the_index(numerics: str, num_left: int) -> None:
    rig = Rig(numerics)
    rig.index.add(b"a" * 16)
    rig.client.stop()
    assert rig.index.count_cached([b"a" * 16]) == num_left, "those of a host tier stay"
