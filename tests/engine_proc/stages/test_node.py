"""The process of a stage: what it makes of seats that are late, wrong or have connected anew."""

import errno
import itertools
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_configs import execution_config
from stage_nodes import new_key, remote_stages

from headrace.board.admin_requests import PROFILE, START_PROFILE, STOP_PROFILE, AdminRequests
from headrace.board.board import Board, Seat
from headrace.config.config import MAX_PP
from headrace.config.process_configs import StageConfig
from headrace.engine_proc.child_processes.child_process import WorkerDied
from headrace.engine_proc.shm.step_channel import NUM_SLOTS
from headrace.engine_proc.stages import stage_run
from headrace.engine_proc.stages.node import StageNode
from headrace.exit_status import ExitStatus
from headrace.ipc.curve_key import read_key
from headrace.ipc.curve_links import CurveLink
from headrace.ipc.messages import Message
from headrace.ipc.remote_messages import (
    FromStage,
    HiddenFrame,
    StageGrant,
    StageStatus,
    WorkerInput,
    WorkerOutput,
)
from headrace.ipc.worker_messages import WorkerReady
from headrace.native_core import best_kernels
from headrace.runtime.process import Context
from support.ports import reserved_port

RUN = 5
READY = WorkerReady(1, 16, hidden_size=4)
DEADLINE_S = 60.0
NUM_OF_RUN = 7  # descriptors of a run and its worker, at least
encode = msgspec.msgpack.encode


class IdleWorker:
    """In place of a worker's process. The test answers for it."""

    OUTPUT = "a line\nand its stacks"

    def __init__(
        self, _context: object, _slot: object, _config: object, channels: Any, *_: object
    ) -> None:
        self.steps, self.results = channels
        for channel in channels:
            os.close(channel.fd)

    def check(self) -> None: ...

    def last_output(self) -> str:
        return self.OUTPUT

    def stop(self) -> None: ...


class Connection:
    """A seat's connection to a stage."""

    def __init__(self, where: str, key_file: Path) -> None:
        self.link = CurveLink(where, read_key(str(key_file)))
        self.statuses: list[StageStatus] = []
        self.outputs: list[bytes] = []
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromStage)

    def work(self) -> None:
        """Take what has come."""
        self.link.lost_connections()
        while (frames := self.link.receive()) is not None:
            message = self._decoder.decode(frames[0])
            if isinstance(message, WorkerOutput):
                self.outputs.append(bytes(frames[1]))
            else:
                self.statuses.append(message)

    def send(self, message: Message, *frames: bytes) -> None:
        """Send the stage a message."""
        assert self.link.send([encode(message), *frames])


class Site:
    """A stage process, its worker, and the test in place of seats."""

    def __init__(self, folder: Path) -> None:
        self.key_file = new_key(folder / "key")
        self.model = folder / "model"
        self.model.mkdir()
        self.terms = remote_stages(folder, self.key_file, str(self.model)).terms
        seats = [Seat("stage", 0), *(Seat("worker", stage) for stage in range(MAX_PP))]
        seats.append(Seat("frontend", 0))
        board = Board.create(seats)
        self.board = board
        context = Context(seats[0], board, board.slot("stage"), "error", os.getpid())
        with reserved_port() as port:
            listen = f"tcp://127.0.0.1:{port}"
            config = StageConfig(listen=listen, key_file=str(self.key_file))
            self.node = StageNode(config, context)
        self.connections: list[Connection] = []

    def connect(self) -> Connection:
        """Return a new connection to the stage."""
        made = Connection(self.node.where, self.key_file)
        self.connections.append(made)
        self.work_until(lambda: made.link.is_connected)
        return made

    def work_until(self, predicate: Callable[[], bool]) -> None:
        """Have all do what they can until something is so."""
        until = time.monotonic() + DEADLINE_S
        while not predicate():
            assert time.monotonic() < until
            self.node.work()
            for connection in self.connections:
                connection.work()

    def grant(
        self,
        connection: Connection,
        run: int = RUN,
        sent_at: int = 1,
        stage: int = 2,
        following: str | None = None,
        wishes: Sequence[int] = (0, 0),
    ) -> None:
        """Send a grant."""
        execution = execution_config(self.model, pp=3, vocab_size=64)
        grant = StageGrant(
            run, sent_at, stage, following, encode(execution), 8, self.terms, list(wishes)
        )
        connection.send(grant)

    def grant_taken(self, connection: Connection, **fields: Any) -> StageStatus:
        """Send a grant and return the answer."""
        num_before = len(connection.statuses)
        self.grant(connection, **fields)
        self.work_until(lambda: len(connection.statuses) > num_before)
        return connection.statuses[-1]

    @property
    def worker(self) -> IdleWorker:
        """The worker of the run."""
        assert self.node._run is not None
        worker: Any = self.node._run._worker
        assert isinstance(worker, IdleWorker)
        return worker

    def close(self) -> None:
        """End threads and sockets."""
        for connection in self.connections:
            connection.link.close()
        self.node._close()
        self.node._listener.close()


def descriptors() -> set[int]:
    """Return the open descriptors of this process, and one that has been closed since."""
    return set(map(int, os.listdir("/proc/self/fd")))


def limit_for(num_more: int) -> int:
    """Return the limit of descriptors with which so many more may be opened."""
    taken = descriptors()
    free = (fd for fd in itertools.count() if fd not in taken)
    return next(itertools.islice(free, num_more, None))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(stage_run, "ChildProcess", IdleWorker)
    made = Site(tmp_path)
    yield made
    made.close()


def test_a_stage_that_cannot_reach_the_next_one_says_so(site: Site) -> None:
    seat = site.connect()
    with reserved_port() as port:
        following = f"tcp://127.0.0.1:{port}"
        assert site.grant_taken(seat, stage=1, following=following).why == ""
        site.worker.results.send(READY)
        run = site.node._run
        assert run is not None
        site.work_until(lambda: run._ready is not None)
        status = site.grant_taken(seat, stage=1, following=following)
    assert status.why == f"its worker is ready and has no link to {following} yet"
    assert not status.has_ended
    assert not seat.outputs


def test_a_seat_that_connects_anew_gets_a_new_run(site: Site) -> None:
    """What the worker said before may be lost with the connection."""
    before, after = site.connect(), site.connect()
    site.grant_taken(before, sent_at=1)
    first = site.worker
    first.results.send(READY)
    site.work_until(lambda: bool(before.outputs))
    site.grant_taken(after, sent_at=2)
    assert site.worker is not first
    site.work_until(lambda: before.statuses[-1].has_ended)
    site.worker.results.send(READY)
    site.work_until(lambda: bool(after.outputs))


def test_late_grants_of_a_dead_seat_end_no_run(site: Site) -> None:
    seat = site.connect()
    assert site.grant_taken(seat, run=RUN, sent_at=1).kernels == best_kernels()
    site.grant_taken(seat, run=RUN + 1, sent_at=3)
    worker = site.worker
    site.grant(seat, run=RUN, sent_at=2)
    site.grant(seat, run=RUN + 1, sent_at=4)
    site.work_until(lambda: seat.statuses[-1].granted_at == 4)
    assert site.worker is worker


def test_a_worker_that_dies_leaves_its_output(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    seat = site.connect()
    site.grant_taken(seat)

    def check() -> None:
        raise WorkerDied("worker 2 was killed by SIGSEGV", 2, -signal.SIGSEGV)

    monkeypatch.setattr(site.worker, "check", check)
    site.work_until(lambda: seat.statuses[-1].has_ended)
    status = seat.statuses[-1]
    assert (status.why, status.output) == ("worker 2 was killed by SIGSEGV", IdleWorker.OUTPUT)
    assert status.exit_status == ExitStatus.FAILED


def test_a_worker_hears_when_operators_ask_for_profiles(site: Site) -> None:
    seat = site.connect()
    site.grant_taken(seat, wishes=(7, 3))
    heard = AdminRequests(site.board, PROFILE)
    site.grant_taken(seat, wishes=(8, 3))
    assert heard.take() == [START_PROFILE]
    site.grant_taken(seat, wishes=(8, 4))
    assert heard.take() == [STOP_PROFILE]


@pytest.mark.parametrize(
    ("message", "frames", "why"),
    [
        (WorkerInput(RUN), [], "0 frames for a worker"),
        (WorkerInput(RUN), [b""] * 3, "3 frames for a worker"),
        (WorkerInput(RUN), [bytes(1 << 24)], "16777216 bytes for a worker, at most"),
        (WorkerInput(RUN), [b"", bytes(1 << 20)], "1048576 bytes of masks, at most"),
        (HiddenFrame(RUN, 0, 1), [b""], "hidden states before the worker is ready"),
        (WorkerOutput(RUN), [], "Invalid value 'worker_output'"),
    ],
)
def test_what_is_wrong_ends_a_run_as_a_fault(
    site: Site, message: Message, frames: list[bytes], why: str
) -> None:
    seat, other = site.connect(), site.connect()
    site.grant_taken(seat)
    other.send(message, *frames)
    site.work_until(lambda: seat.statuses[-1].has_ended)
    assert f"was sent what is wrong: {why}" in seat.statuses[-1].why
    assert seat.statuses[-1].exit_status == ExitStatus.FAILED
    assert not site.grant_taken(seat).why, "another run begins"


def test_more_messages_than_a_worker_takes_end_a_run(site: Site) -> None:
    seat = site.connect()
    site.grant_taken(seat)
    for _ in range(NUM_SLOTS + 1):
        seat.send(WorkerInput(RUN), b"")
    site.work_until(lambda: seat.statuses[-1].has_ended)
    assert "more than its worker takes" in seat.statuses[-1].why


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"stage": 0}, "stage 0 of 3"),
        ({"stage": 3}, "stage 3 of 3"),
        ({"wishes": (-1, 0)}, "operators have asked -1 times"),
        ({"wishes": (1 << 63, 0)}, "operators have asked"),
        ({"wishes": ()}, "zip()"),
        ({"stage": 1, "following": "elsewhere"}, "elsewhere is no address"),
    ],
)
def test_a_grant_that_is_wrong_is_answered(site: Site, fields: dict[str, Any], why: str) -> None:
    status = site.grant_taken(site.connect(), **fields)
    assert why in status.why
    assert status.exit_status == ExitStatus.FAILED


def test_a_system_that_refuses_a_worker_is_asked_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> IdleWorker:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    seat = site.connect()
    num_open = len(descriptors())
    with monkeypatch.context() as patch:
        patch.setattr(stage_run, "ChildProcess", refuse)
        for _ in range(3):
            status = site.grant_taken(seat)
    assert "no more processes" in status.why
    assert status.exit_status is None, "its worker has not ended: the seat waits"
    assert len(descriptors()) == num_open
    assert not site.grant_taken(seat).why


def test_a_run_that_cannot_begin_leaves_no_descriptor_open(site: Site) -> None:
    """Whichever descriptor is the one too many."""
    seat = site.connect()
    assert not site.grant_taken(seat, stage=1).why
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    whys: list[str] = []
    while not whys or whys[-1]:
        site.node._close()
        num_open = len(descriptors())
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(len(whys)), hard))
        try:
            whys.append(site.grant_taken(seat, stage=1).why)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not whys[-1] or len(descriptors()) == num_open, f"{len(whys)} more were allowed"
    assert len(whys) > NUM_OF_RUN
    assert all("Too many open files" in why for why in whys[:-1])
