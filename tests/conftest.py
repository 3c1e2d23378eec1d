"""What all tests have in common."""

import faulthandler
import functools
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings
from opened import OPENED, open_files
from schedule import Schedule, rank
from unit_tests import is_left_out, refuse_slow
from xdist.remote import Producer

# Read when triton is first imported, be it by transformers.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Threads that spin while they wait for each other take ten times as long beside busy servers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A test that hangs fails, and the others go on; 0 is no limit. No test comes near it, however slow
# the machine.
TEST_S = int(os.environ.get("TEST_S", "600"))
ROOT = Path(__file__).parents[1]
GRACE_S = 60  # later the process ends: native code that waits lets no test fail
# Responses have the time that tests have: httpx's 5 s may pass where many processes share the
# cores.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(vars(httpx.Timeout(120)))
# Certificates take 20 ms to read, which `httpx.get` does each time.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)

MOST_DESCRIPTORS = 800  # of a process that has run all tests; select() refuses more than 1,023

# How fast examples are made says how busy the machine is, and nothing about us. They are the same
# each time, but where it is wanted that they are not: `make fuzz` is for finding more.
EXPLORES = "EXPLORE" in os.environ
FAST = "FAST" in os.environ  # `make test-fast`: unit tests alone
MOST_EXAMPLES = 10 if FAST else 40  # also of tests that name more, which `make fuzz` makes
settings.register_profile(
    "headrace",
    suppress_health_check=[HealthCheck.too_slow],
    deadline=None,
    derandomize=not EXPLORES,
    max_examples=100 if EXPLORES else MOST_EXAMPLES,
)
settings.load_profile("headrace")
if FAST:
    sys.addaudithook(refuse_slow)


def give_up(_signal: int, _frame: FrameType | None) -> None:
    pytest.fail(f"it hangs: {TEST_S} s have passed")


def pytest_configure(config: pytest.Config) -> None:
    """Look for no garbage while tests are imported: all of it stays, and looks take seconds.

    What tests open is recorded by a plugin: hooks of a conftest know no fixture of a session.
    """
    config.pluginmanager.register(OPENED)
    if hasattr(config, "workerinput"):  # the process that starts the others collects no tests
        gc.disable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say that the core which the tests have run is an older one: pytest compiles nothing."""
    core = max((path.stat().st_mtime for path in ROOT.glob("headrace/_core*.so")), default=0.0)
    newer = [path for path in ROOT.glob("csrc/**/*.*") if path.stat().st_mtime > core > 0]
    if newer:
        what = f"the core is older than {newer[0].relative_to(ROOT)}: run `make .venv/core`"
        terminalreporter.write_line(what, yellow=True)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries complain of what is left at the end


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if FAST and is_left_out(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if FAST:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    items.sort(key=rank)
    for item in () if EXPLORES else items:
        test: Any = getattr(item, "obj", None)
        # A test's own settings outrank the profile; hypothesis has no public way to change them.
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples > MOST_EXAMPLES:
            test._hypothesis_internal_use_settings = settings(own, max_examples=MOST_EXAMPLES)


@contextmanager
def limited(config: pytest.Config) -> Iterator[None]:
    """Fail a test, from wherever it waits, that takes too long; else end its process."""
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TEST_S)
    if TEST_S:
        stderr = config.stash[fault_handler_stderr_fd_key]  # it is not captured
        faulthandler.dump_traceback_later(TEST_S + GRACE_S, file=stderr, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    if "torch" in sys.modules:  # models that earlier tests loaded have set more
        sys.modules["torch"].set_num_threads(1)
    with limited(item.config):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    with limited(item.config):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    with limited(item.config):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def few_descriptors() -> Iterator[None]:
    """Tests close what they open, or what they hold to is closed behind them."""
    yield
    left = open_files()
    assert left.total() <= MOST_DESCRIPTORS, left.most_common(20)


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers of tests write nothing to the home folder of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder for sockets, whose names have room for no more than a short one."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield Path(folder)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Schedule:
    return Schedule(config, log)
