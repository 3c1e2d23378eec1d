"""What tests open and leave open, closed with the test or fixture that opened it.

Boards and other shared memory live as long as their process, so nothing of ours closes them. A test
that fails leaves its servers, too, and these would make a later test fail.
"""

import functools
import gc
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.runtime.stack_dumps import NAME as STACKS

OURS = "headrace-"
DESCRIPTORS = Path("/proc/self/fd")
# Files in memory go by these: their descriptors may be closed, and those of other files by then.
FileId = tuple[int, int]


class Opened:
    """Closes what is open at the end of a test or fixture; a plugin of pytest."""

    def __init__(self) -> None:
        self._owner = ExitStack()  # the test's, or that of a fixture which is being made
        self._logs: dict[str, Callable[[], str]] = {}  # of what is open, by title

    def record(self) -> None:
        """From now on, know of each file in memory."""
        os.memfd_create = reporting(os.memfd_create, self._take_file)

    def pytest_configure(self) -> None:
        self.record()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        own = ExitStack()
        request.addfinalizer(own.close)  # the first one, so the last that is called
        with self.owned_by(own):
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)  # within the limit of time
    def pytest_runtest_teardown(self) -> Generator[None]:
        try:
            return (yield)
        finally:
            self.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            report.sections += [(title, read()) for title, read in self._logs.items()]
        return report

    def show_at_failure(self, title: str, read: Callable[[], str]) -> None:
        """Show a log beside each failure until the test or fixture that is being run is over."""
        self._logs[title] = read
        self._owner.callback(self._logs.pop, title)

    def close_with_owner(self, close: Callable[[], object]) -> None:
        """Call `close` when the test or fixture that is being run is over."""
        self._owner.callback(close)

    @contextmanager
    def owned_by(self, fixture: ExitStack) -> Iterator[None]:
        """What is opened meanwhile belongs to a fixture."""
        self._owner, others = fixture, self._owner
        try:
            yield
        finally:
            self._owner = others

    def close(self) -> None:
        """Close what the test has left open."""
        self._owner.close()

    def _take_file(self, fd: int, name: str, *_: object) -> None:
        # A stack file ends with its process, which may outlive the test.
        if name.startswith(OURS) and name != STACKS:
            self._owner.callback(close_file, fd, id_of(fd))


OPENED = Opened()


def reporting(function: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that also tells what it returns, and its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        made = function(*args, **options)
        tell(made, *args)
        return made

    return call


def id_of(fd: int) -> FileId:
    """Return what tells a file from all others that are open."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def close_file(fd: int, id: FileId) -> None:
    """Close a descriptor unless that was done before, whatever it is of by now."""
    with suppress(OSError):
        if id_of(fd) == id:
            os.close(fd)


def open_files() -> Counter[str]:
    """Return how many descriptors there are of each file, or of each kind."""
    gc.collect()
    found: Counter[str] = Counter()
    for link in DESCRIPTORS.iterdir():
        with suppress(OSError):  # the one that lists them
            found[os.readlink(link).split(":[")[0]] += 1
    return found
