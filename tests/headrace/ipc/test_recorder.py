"""What a process receives, in a file."""

import os
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.ipc.messages import Abort, ToEngine
from headrace.ipc.recorder import Tee, begin, prepare_folder, read_record
from headrace.ipc.sockets import Inbox, Outbox, address

DEADLINE_MS = 120_000
NOTE = b"a note"


def test_messages_are_read_as_they_were_taken(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.record"
    tee = Tee(path, NOTE)
    tee.take([b"one", memoryview(b"its bulk"), b"two", b""])
    tee.take([b"three"])
    tee.close()
    note, first, second = read_record(path)
    assert note.frames == [NOTE]
    assert list(first.pairs()) == [(b"one", b"its bulk"), (b"two", b"")]
    assert list(second.pairs()) == [(b"three", b"")]
    assert note.at_ns <= first.at_ns <= second.at_ns


def test_recording_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    begun = begin(prepare_folder(str(folder)), "engine-0", NOTE)
    assert begun is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "engine-0.record").stat().st_mode & 0o777 == 0o600
    begun.close()


def test_recording_ends_before_its_limit_and_the_process_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engine-0.record"
    tee = Tee(path, NOTE, max_bytes=1000)
    for _ in range(3):
        tee.take([b"x" * 400])
    tee.take([b"y"])
    assert [entry.frames for entry in read_record(path)] == [[NOTE], [b"x" * 400], [b"x" * 400]]
    (line,) = caplog.messages
    assert line == f"the record {path} ends here: it is as long as it may be"


def test_a_full_disk_ends_it_and_the_process_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine-0.record"
    tee = Tee(path, NOTE)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    tee.take([b"of which the disk takes a part"])
    tee.take([b"more"])
    assert [entry.frames for entry in read_record(path)] == [[NOTE]]
    assert caplog.messages == [f"the record {path} ends here: the disk is full"]


def test_it_is_of_the_first_process_in_a_seat(tmp_path: Path) -> None:
    first = begin(str(tmp_path), "engine-0", NOTE)
    assert first is not None
    assert begin(str(tmp_path), "engine-0", NOTE) is None
    first.close()


def test_without_a_folder_there_is_none(tmp_path: Path) -> None:
    assert begin(str(tmp_path / "missing"), "engine-0", NOTE) is None


def test_a_folder_with_a_record_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "engine-0.record").touch()
    with pytest.raises(ConfigError, match=r"--record .* has a record already; name another"):
        prepare_folder(str(tmp_path))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--record .*file/x: Not a directory"):
        prepare_folder(str(tmp_path / "file" / "x"))


def test_an_inbox_records_what_comes_as_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.record"
    tee = Tee(path, NOTE)
    where = address(str(tmp_path), "engine")
    inbox: Inbox[ToEngine] = Inbox(where, ToEngine, tee=tee)
    outbox = Outbox(where)
    outbox.send_all([(Abort(1), b"a"), (Abort(2), b"b")])
    for _ in range(2):
        assert inbox.receive(DEADLINE_MS) is not None
    outbox.close()
    inbox.close()
    tee.close()
    _, both = read_record(path)
    assert [bulk for _, bulk in both.pairs()] == [b"a", b"b"]
