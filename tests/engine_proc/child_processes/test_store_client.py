"""What the engine asks its KV store for, one message at a time."""

import time
from types import SimpleNamespace
from typing import Any

from headrace.engine_proc.child_processes.store_client import StoreClient
from headrace.ipc.worker_messages import Drain, Drained, FromStore, Lookup, LookupResult, ToStore
from headrace.supervision.restart_backoff import RestartBackoff


class Rig:
    """A client of a store that is played."""

    def __init__(self) -> None:
        self.sent: list[ToStore] = []
        self.answers: list[FromStore] = []
        self.lookups: list[Lookup] = []  # that sequences want
        self.client: Any = StoreClient.__new__(StoreClient)
        self.client._child = SimpleNamespace(
            send=self.sent.append,
            receive=lambda _wait_s: self.answers.pop() if self.answers else None,
            check=lambda: None,
        )
        self.client._fetcher = SimpleNamespace(
            look_at_clock=lambda: None,
            ask=lambda _answer: self.lookups.pop() if self.lookups else None,
        )
        self.client._clock, self.client._restarts = time.monotonic, RestartBackoff()
        self.client._is_ready, self.client._is_asked, self.client._is_keeping = True, False, False

    def answer(self, *answers: FromStore) -> None:
        """Have the store answer, and the client look."""
        self.answers += answers
        self.client.poll()


def test_a_store_is_told_once_to_keep_all_that_is_cached() -> None:
    rig = Rig()
    rig.client.keep_all()
    for _ in range(2):
        rig.answer()
        assert (rig.client.is_keeping, rig.sent) == (True, [Drain()])
    rig.answer(Drained())
    assert (rig.client.is_keeping, rig.sent) == (False, [Drain()])


def test_what_sequences_wait_for_is_asked_first() -> None:
    rig = Rig()
    rig.client.keep_all()
    rig.lookups.append(Lookup(b"digest"))
    rig.answer()
    assert rig.sent == [Lookup(b"digest")]
    rig.answer(LookupResult(b"\0", b""))
    assert rig.sent[1:] == [Drain()]


def test_a_store_that_does_not_serve_keeps_nothing() -> None:
    rig = Rig()
    rig.client._is_ready = False
    rig.client.keep_all()
    assert not rig.client.is_keeping
