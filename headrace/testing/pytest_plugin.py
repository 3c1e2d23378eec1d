"""The pytest plugin: `headrace_server` and `headrace_url`, a server for the whole session.

Nothing of Headrace is imported until a test asks for one of them. With pytest-xdist each worker
has a server of its own, so scripts and recorded requests are those of one test.
"""

import shlex
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headrace.testing.scripted_server import ScriptedServer

FIXTURE = "headrace_server"
OPTIONS = {
    "model": "model of headrace_server, as launch_server takes it; default: the demo model",
    "engine": "engine of headrace_server: mock, which tests script, or auto, which runs the model",
    "args": "further flags of headrace_server's launch_server, in one text",
}
SERVER = pytest.StashKey["ScriptedServer"]()
LOG_START = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options; each is a flag and a line of the ini file."""
    group = parser.getgroup("headrace")
    for name, help in OPTIONS.items():
        group.addoption(f"--headrace-{name}", metavar=name.upper(), help=help)
        parser.addini(f"headrace_{name}", help=help, default="")


def option(config: pytest.Config, name: str) -> str:
    """Return the value of a flag, or of the ini file's line; empty where there is neither."""
    given = config.getoption(f"headrace_{name}")
    return str(config.getini(f"headrace_{name}") if given is None else given)


@pytest.fixture(scope="session")
def headrace_server(pytestconfig: pytest.Config) -> "Iterator[ScriptedServer]":
    """A server on a free port: `script`, `requests`, `url`. Each test begins without a script."""
    from headrace.testing.scripted_server import ScriptedServer

    server = ScriptedServer(
        option(pytestconfig, "model") or None,
        option(pytestconfig, "engine") or "mock",
        shlex.split(option(pytestconfig, "args")),
    )
    pytestconfig.stash[SERVER] = server
    try:
        server.reset()
        yield server
    finally:
        del pytestconfig.stash[SERVER]
        server.close()


@pytest.fixture(scope="session")
def headrace_url(headrace_server: "ScriptedServer") -> str:
    """Where `headrace_server` is; OpenAI's clients take it with `/v1` behind it."""
    return headrace_server.url


def server_of(item: pytest.Item) -> "ScriptedServer | None":
    """Return the server that a test uses, if it runs already."""
    is_used = FIXTURE in getattr(item, "fixturenames", ())
    return item.config.stash.get(SERVER, None) if is_used else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have a test begin without the script and the requests of the one before it."""
    server = server_of(item)
    item.stash[LOG_START] = 0 if server is None else server.log_size
    if server is not None:
        server.reset()


@pytest.hookimpl(hookwrapper=True)  # pytest 7 has no other
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Show what the server logged while a test failed."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()
    server = server_of(item)
    if report.failed and server is not None:
        log = server.log(item.stash.get(LOG_START, 0))
        report.sections.append(("headrace server log", log or "(nothing)"))
