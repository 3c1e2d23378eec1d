"""What is kept of a process that died, and what is not."""

import json
import logging
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

import headrace.supervision.crash_reports as crash_reports_module
from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField, EngineField
from headrace.config.config import ServerConfig
from headrace.config.process_configs import CrashConfig
from headrace.supervision.crash_reports import (
    MAX_CRASH_REPORTS,
    CrashReports,
    crash_directory,
    write,
)

DEADLINE_S = 120
SEATS = [Seat("tokenizer", 0), Seat("engine", 0), Seat("frontend", 0)]


def make(directory: Path | None) -> Board:
    """Have a crash report made of a tokenizer."""
    config = ServerConfig(model="m.gguf", api_key=("secret-key",), max_num_seqs=5)
    where = None if directory is None else str(directory)
    board = Board.create(SEATS)
    for slot in board.slots:
        slot.enter(State.STARTING)
        slot.enter(State.READY)
    board.slot("engine")[EngineField.RUNNING] = 3
    board.slot("frontend").open_ids = [0xAB0000, 0xCD0000]
    dead = board.slot("tokenizer")
    dead.keep_line(b"12:00:00 tokenizer 0 INFO one\n12:00:01 tokenizer 0 INFO two\n")
    dead.exit_reason = "no memory"
    dead[CommonField.STATE] = State.DEAD
    crash_reports = CrashReports(CrashConfig.of(config, where), board)
    crash_reports.make(dead, "exited with 1", "Thread 1:\n  File x", [0xAB0000, 0])
    crash_reports.close()
    return board


def read(directory: Path) -> Any:
    (path,) = directory.iterdir()
    return json.loads(path.read_text())


def test_crash_report_names_the_dead_and_lists_the_others(tmp_path: Path) -> None:
    make(tmp_path / "a/b")
    found = read(tmp_path / "a/b")
    assert (found["process"], found["ended"]) == ("tokenizer 0", "exited with 1")
    assert found["last_words"] == "no memory"
    assert [line[-3:] for line in found["log"]] == ["one", "two"]
    assert found["requests_at_hand"] == ["ab0000"]
    tokenizer, engine, frontend = found["processes"]
    assert (tokenizer["state"], tokenizer["stacks"]) == ("dead", ["Thread 1:", "  File x"])
    assert (engine["state"], engine["running"], engine["starts"]) == ("ready", 3, 1)
    assert frontend["requests"] == ["ab0000", "cd0000"]
    assert (found["flags"]["model"], found["flags"]["max_num_seqs"]) == ("m.gguf", 5)


def test_crash_report_has_no_keys_and_is_for_its_owner(tmp_path: Path) -> None:
    make(tmp_path / "crashes")
    (path,) = (tmp_path / "crashes").iterdir()
    assert "secret-key" not in path.read_text()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_concurrent_deaths_have_a_crash_report_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_room = threading.Event()

    def write_late(*args: Any) -> None:
        assert has_room.wait(DEADLINE_S)
        write(*args)

    monkeypatch.setattr(crash_reports_module, "write", write_late)
    board = Board.create(SEATS)
    crash_reports = CrashReports(CrashConfig.of(ServerConfig(), str(tmp_path)), board)
    for slot in board.slots:
        crash_reports.make(slot, "exited with 1", "")
    has_room.set()
    assert crash_reports._writer is not None
    crash_reports.close()
    crash_reports._writer.join(DEADLINE_S)
    found = [json.loads(path.read_text())["process"] for path in sorted(tmp_path.iterdir())]
    assert sorted(found) == sorted(map(str, SEATS))


def test_without_a_directory_there_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(None)
    assert not caplog.records


def test_the_oldest_go(tmp_path: Path) -> None:
    unfinished = tmp_path / ".20260101-000000.json"  # another process is at it
    unfinished.touch()
    for number in range(MAX_CRASH_REPORTS + 3):
        write(tmp_path, f"20260101-{number + 1:06}.json", b"{}")
    unfinished.unlink()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == MAX_CRASH_REPORTS
    assert names[0] == "20260101-000004.json"


def test_a_full_disk_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        write(tmp_path, "big.json", bytes(4096))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no crash report in" in record.message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flag", "environment", "where"),
    [
        ("/x", {"HOME": "/home/me"}, "/x"),
        ("", {"HOME": "/home/me"}, None),
        (None, {"HOME": "/home/me"}, "/home/me/.local/state/headrace/crashes"),
        (None, {"HOME": "/home/me", "XDG_STATE_HOME": "/s"}, "/s/headrace/crashes"),
        (None, {}, None),
    ],
)
def test_crash_reports_are_with_the_users_state(
    flag: str | None, environment: dict[str, str], where: str | None
) -> None:
    assert crash_directory(flag, environment) == where
