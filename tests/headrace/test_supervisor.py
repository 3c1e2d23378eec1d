"""The parts of the supervisor that start no process."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.board import Seat
from headrace.config import ServerConfig
from headrace.roles import ROLES, title
from headrace.supervisor import ChildDied, is_abandoned, seats_of, sweep


def bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """Listen in the run directory of a server that lives."""
    directory = tmp_path / "headrace-live"
    directory.mkdir()
    bound = bind(directory / "engine-0.sock")
    yield bound
    bound.close()


def leave_behind(directory: Path) -> Path:
    """Make a run directory as a killed server leaves it: a socket file, nobody behind it."""
    directory.mkdir()
    bind(directory / "engine-0.sock").close()
    assert (directory / "engine-0.sock").exists()
    return directory


def test_there_is_a_seat_per_process() -> None:
    config = ServerConfig(frontend_procs=2, tokenizer_procs=3, detokenizer_procs=1)
    seats = seats_of(config)
    assert len(seats) == len(set(seats)) == 2 + (3 + 1) + 1 + 1 + 1
    assert [s for s in seats if s.role == "tokenizer"] == [Seat("tokenizer", i) for i in range(4)]
    assert {seat.role for seat in seats} == set(ROLES)


def test_a_title_has_a_number_where_there_can_be_several() -> None:
    assert title("frontend", 1) == "headrace: frontend 1"
    assert title("engine", 0) == "headrace: engine"


def test_only_what_nobody_listens_in_is_abandoned(tmp_path: Path, listener: socket.socket) -> None:
    assert is_abandoned(leave_behind(tmp_path / "headrace-dead"))
    assert not is_abandoned(tmp_path / "headrace-live")


def test_one_live_socket_among_dead_ones_keeps_a_directory(
    tmp_path: Path, listener: socket.socket
) -> None:
    for name in ("a.sock", "z.sock"):
        bind(tmp_path / "headrace-live" / name).close()
    assert not is_abandoned(tmp_path / "headrace-live")


def test_a_directory_without_sockets_may_belong_to_a_server_that_starts(tmp_path: Path) -> None:
    assert not is_abandoned(tmp_path)


def test_sweep_removes_the_abandoned_and_nothing_else(
    tmp_path: Path, listener: socket.socket
) -> None:
    dead = leave_behind(tmp_path / "headrace-dead")
    other = leave_behind(tmp_path / "other-dead")
    (tmp_path / "headrace-new").mkdir()
    (tmp_path / "headrace-file").touch()
    sweep(tmp_path)
    assert not dead.exists()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"headrace-live", "headrace-new", "headrace-file", other.name}


def test_sweep_leaves_other_users_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = leave_behind(tmp_path / "headrace-dead")
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    sweep(tmp_path)
    assert dead.exists()


def test_a_dead_child_is_named_with_how_it_died() -> None:
    killed = ChildDied(Seat("worker", 0), -signal.SIGKILL)
    assert str(killed) == "worker 0 was killed by SIGKILL"
    ended = ChildDied(Seat("engine", 0), 3, "no memory")
    assert str(ended) == "engine 0 exited with 3 (no memory)"
