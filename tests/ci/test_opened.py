"""What tests leave open is closed behind them."""

import os
from contextlib import ExitStack

import pytest
from opened import Opened, open_files

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
