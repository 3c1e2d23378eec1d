"""Chromium with the page of a server, for `make ui-test`; without either they are skipped."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import RunningServer
from web_page import DEADLINE_MS, KEY, Console

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NUM_TOKENS = 40  # of an answer
STEP_MS = 20  # of the mock: an answer takes as long as it takes to stop it


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="make ui-test")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; install Debian's package chromium")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step times of a mock that answers no faster than people read."""
    path = tmp_path_factory.mktemp("profile") / "slow.json"
    path.write_text(json.dumps({"step_ms": [[0, STEP_MS]]}))
    return path


@pytest.fixture(scope="session")
def start(browser: Any, profile: Path) -> Callable[..., RunningServer]:
    """What starts a server of the mock that asks for `KEY`; where there is a browser."""

    def start(*args: str) -> RunningServer:
        slow = ("--engine", "mock", "--mock-profile", str(profile))
        return RunningServer(*slow, "--api-key", KEY, *args)

    return start


@pytest.fixture(scope="session")
def server(start: Callable[..., RunningServer]) -> Iterator[RunningServer]:
    running = start()
    yield running
    assert running.stop() == 0


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """What opens a page of a server in a browser that has kept nothing but the key, if any."""
    contexts, consoles = [], []

    def open_page(
        url: str = "", key: str | None = KEY, max_tokens: int = NUM_TOKENS, **options: Any
    ) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(DEADLINE_MS)
        settings = {"numbers": {"max_tokens": str(max_tokens)}}
        kept = {"headrace.settings": json.dumps(settings)}
        if key is not None:
            kept["headrace.api-key"] = key
        script = f"for (const [k, v] of Object.entries({json.dumps(kept)})) localStorage[k] ??= v"
        context.add_init_script(script)
        page = context.new_page()
        contexts.append(context)
        consoles.append(Console(page))
        if url:
            page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [complaint for console in consoles for complaint in console.complaints] == []


@pytest.fixture
def page(server: RunningServer, open_page: Callable[..., Any]) -> Any:
    return open_page(server.url)
