"""Aborts are found when they are looked for, and looked for at a limited rate."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.ipc.aborted_ids import MAX_ABORTED
from headrace.ipc.messages import Abort
from headrace.ipc.sockets import Outbox, address
from headrace.tokenizer_proc.jobs.aborts import POLL_INTERVAL_S, Abandoned, Aborts

DEADLINE_MS = 120_000


class Rig:
    """What one process has been told, at times that a test chooses."""

    def __init__(self, run_dir: str) -> None:
        self.now = 100.0
        self.aborts = Aborts(run_dir, 1, lambda: self.now)
        self._frontend = Outbox(address(run_dir, "aborts", 1))

    def tell(self, *requests: int) -> None:
        """Tell of some, and wait until that has arrived."""
        self._frontend.send_all([(Abort(request), b"") for request in requests])
        assert self.aborts._inbox.wait(DEADLINE_MS)

    def close(self) -> None:
        self._frontend.close()
        self.aborts.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(str(tmp_path))
    yield made
    made.close()


def test_only_disconnected_requests_are_abandoned(rig: Rig) -> None:
    rig.tell(5, 7)
    rig.aborts.check(6)
    for request in (5, 7):
        assert request in rig.aborts
        with pytest.raises(Abandoned):
            rig.aborts.check(request)
    assert 6 not in rig.aborts


def test_there_is_one_look_in_a_while(rig: Rig) -> None:
    rig.aborts.look()
    rig.tell(5)
    rig.now += POLL_INTERVAL_S / 2
    rig.aborts.check(5)
    rig.now += POLL_INTERVAL_S
    with pytest.raises(Abandoned):
        rig.aborts.check(5)


def test_old_aborts_are_forgotten(rig: Rig) -> None:
    rig.tell(*range(MAX_ABORTED + 1))
    rig.aborts.look()
    assert 0 not in rig.aborts
    assert 1 in rig.aborts and MAX_ABORTED in rig.aborts
