"""Run directories: one's own, and those that others have left."""

import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.runtime.run_directory import RunDirectory, is_abandoned, is_held, sweep


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
    """Make a run directory as a killed server leaves it: a socket file without a listener."""
    directory.mkdir()
    bind(directory / "engine-0.sock").close()
    assert (directory / "engine-0.sock").exists()
    return directory


def test_a_directory_is_its_users_alone_and_goes_with_its_server(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(socket_folder))
    directory = RunDirectory()
    assert Path(directory.path).stat().st_mode & 0o777 == 0o700
    bind(Path(directory.path) / "engine-0.sock").close()
    directory.remove()
    assert not list(socket_folder.iterdir())


def test_a_server_that_starts_at_the_same_time_is_left_alone(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(socket_folder))
    first = RunDirectory()
    with socket.socket(socket.AF_UNIX) as unready:  # bound, and not listening yet
        unready.bind(str(Path(first.path) / "engine-0.sock"))
        second = RunDirectory()
        assert Path(first.path).exists()
    first.remove()
    second.remove()


def test_probing_a_new_directory_leaves_its_server_alive(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp

    def make_and_look(prefix: str) -> str:
        path = make(prefix=prefix, dir=socket_folder)
        look = os.open(path, os.O_RDONLY)
        fcntl.flock(look, fcntl.LOCK_EX)
        threading.Timer(0.05, os.close, [look]).start()
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_look)
    directory = RunDirectory()
    assert is_held(Path(directory.path))
    directory.remove()


def test_a_folder_whose_name_is_too_long_for_sockets_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match=r"x is too long a name .*; set TMPDIR to another"):
        RunDirectory()
    assert not list(folder.iterdir())


def test_no_folder_that_can_be_written_to_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="No such file or directory; set TMPDIR to a folder"):
        RunDirectory()


def test_directory_is_abandoned_only_without_a_listener(
    tmp_path: Path, listener: socket.socket
) -> None:
    assert is_abandoned(leave_behind(tmp_path / "headrace-dead"))
    assert not is_abandoned(tmp_path / "headrace-live")


def test_one_live_socket_among_dead_ones_keeps_a_directory(
    tmp_path: Path, listener: socket.socket
) -> None:
    for name in ("a.sock", "z.sock"):
        bind(tmp_path / "headrace-live" / name).close()
    assert not is_abandoned(tmp_path / "headrace-live")


def test_empty_directory_is_in_use_only_for_a_short_time(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(socket_folder))
    left, held = socket_folder / "headrace-left", RunDirectory()
    left.mkdir()
    assert not is_abandoned(left)
    os.utime(left, (0, 0))
    os.utime(held.path, (0, 0))
    (socket_folder / "headrace-bench").mkdir()
    (socket_folder / "headrace-bench/results").touch()
    os.utime(socket_folder / "headrace-bench", (0, 0))
    sweep(socket_folder)
    assert {path.name for path in socket_folder.iterdir()} == {
        "headrace-bench",
        Path(held.path).name,
    }
    held.remove()


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
