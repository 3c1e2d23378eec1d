"""What tests leave open is closed behind them."""

import os
import signal
import subprocess
from contextlib import ExitStack

import pytest
from opened import OPENED, Opened, open_files
from servers import kill_tree

NAME = "/memfd:headrace-test (deleted)"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    monkeypatch.setattr(os, "memfd_create", os.memfd_create)
    made = Opened()
    made.record()
    return made


def test_what_a_test_leaves_is_closed_behind_it(opened: Opened) -> None:
    os.memfd_create("headrace-test")
    assert open_files()[NAME] == 1
    opened.close()
    assert open_files()[NAME] == 0


def test_another_file_with_the_number_of_a_closed_one_stays(opened: Opened) -> None:
    fd = os.memfd_create("headrace-closed")
    os.close(fd)
    reader, writer = os.pipe()
    assert fd in (reader, writer)
    opened.close()
    os.close(reader)
    os.close(writer)


def test_what_a_fixture_opens_outlives_the_test(opened: Opened) -> None:
    with ExitStack() as fixture:
        with opened.owned_by(fixture):
            os.memfd_create("headrace-test")
        opened.close()
        assert open_files()[NAME] == 1
    assert open_files()[NAME] == 0


def test_closing_has_a_limit_of_time() -> None:
    def check() -> None:
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0

    OPENED.close_with_owner(check)


def test_suspended_children_end_with_their_parent() -> None:
    command = ["sh", "-c", "sleep 1000 & kill -STOP $!; echo begun >&2; wait"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.readline() == b"begun\n"
    kill_tree(process)
    assert process.returncode == -signal.SIGKILL
