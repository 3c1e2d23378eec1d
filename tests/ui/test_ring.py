"""The Ring tab in Chromium: the drawing, its table, and a worker that dies and comes back."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from servers import RunningServer, wait_until
from web_page import KEY, await_tab, shoot

HEADERS = {"authorization": f"Bearer {KEY}"}
PROMPT = {"prompt": "Where do rivers rise?", "max_tokens": 30, "ignore_eos": True}
SEQUENCE = PROMPT | {"prompt": "one two three four " * 8, "temperature": 0}
RING = "svg.ring [data-process]"


@pytest.fixture(scope="module")
def real(browser: Any) -> Iterator[RunningServer]:
    """A server of the demo model, which has a worker; where there is a browser."""
    assert browser
    running = RunningServer("--api-key", KEY, "--max-model-len", "256", "--speculative", "ngram")
    yield running
    assert running.stop() == 0


@pytest.fixture
def ring(real: RunningServer, open_page: Callable[..., Any]) -> Any:
    page = open_page(f"{real.url}/#ring")
    await_tab(page, "ring")
    return page


def test_every_process_is_drawn_and_in_the_table(ring: Any, real: RunningServer) -> None:
    processes = ring.locator(RING).evaluate_all("all => all.map((one) => one.dataset.process)")
    assert processes == [
        "frontend 0",
        "tokenizer 0",
        "tokenizer 1",
        "tokenizer 2",
        "engine 0",
        "worker 0",
        "detokenizer 0",
    ]
    ring.get_by_text("All processes as a table").click()
    state = httpx.get(f"{real.url}/ring", headers=HEADERS).json()
    row = ring.get_by_role("row").filter(has_text="worker 0")
    row.get_by_role("cell", name=str(state["workers"][0]["pid"]), exact=True).wait_for()
    drawing = ring.get_by_role("img", name="The processes of the server as a ring")
    assert drawing.count() == 1


def test_work_shows_in_the_figures(ring: Any, real: RunningServer) -> None:
    httpx.post(f"{real.url}/v1/completions", json=PROMPT, headers=HEADERS).raise_for_status()
    speed = ring.locator("svg.ring .middle .large")
    speed.filter(has_text=re.compile("[1-9]")).wait_for()
    histogram = ring.get_by_role(
        "img", name="Time to first token: distribution, 1 in the last hour"
    )
    histogram.wait_for()  # with the next point, within ten seconds


def test_drafts_show_once_there_are_any(ring: Any, real: RunningServer) -> None:
    httpx.post(f"{real.url}/v1/completions", json=SEQUENCE, headers=HEADERS).raise_for_status()
    engine = ring.locator("svg.ring [data-process='engine 0']")
    engine.get_by_text("Draft hits").wait_for()


def test_a_worker_that_dies_is_shown_until_it_is_back(ring: Any, real: RunningServer) -> None:
    worker = httpx.get(f"{real.url}/ring", headers=HEADERS).json()["workers"][0]
    os.kill(worker["pid"], signal.SIGKILL)
    node = ring.locator("svg.ring [data-process='worker 0']")
    deaths = ring.get_by_role("list").filter(has_text="worker 0")
    deaths.get_by_text("was killed by SIGKILL").wait_for()
    ring.locator("[data-process='worker 0'][data-status='returned']").wait_for()
    assert "back after" in node.text_content()
    deaths.get_by_text("back after").wait_for()
    assert "worker 0 was killed by SIGKILL" in ring.get_by_role("status").all_inner_texts()[-1]


def open_requests(server: RunningServer) -> int:
    """Return how many requests are open, this one among them."""
    state = httpx.get(f"{server.url}/ring", headers=HEADERS).json()
    return sum(frontend["open_requests"] for frontend in state["frontends"])


def test_the_tab_reads_events_only_while_it_is_shown(ring: Any, real: RunningServer) -> None:
    ring.get_by_role("link", name="Try").click()
    ring.get_by_role("heading", name="Try").wait_for()
    wait_until(lambda: open_requests(real) == 1, "only this request is open")
    with ring.expect_response("**/ring/events"):
        ring.get_by_role("link", name="Ring").click()
    await_tab(ring, "ring")


def test_a_lost_stream_is_opened_again(ring: Any, real: RunningServer) -> None:
    frontend = httpx.get(f"{real.url}/ring", headers=HEADERS).json()["frontends"][0]["pid"]
    with ring.expect_response("**/ring/events", timeout=60_000):
        os.kill(frontend, signal.SIGKILL)
    ring.get_by_text("frontend 0 was killed by SIGKILL").first.wait_for(state="attached")


NUM_CLIENTS = (2, 4, 6, 3)  # each as many seconds as SHOWN_S has for it
SHOWN_S = 60


@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="make ui-test SCREENSHOTS=1")
def test_ring_is_shot(open_page: Callable[..., Any]) -> None:
    running = RunningServer("--api-key", KEY, "--frontend-procs", "2", "--detokenizer-procs", "2")
    page = open_page(f"{running.url}/#ring", viewport={"width": 1120, "height": 1140})
    await_tab(page, "ring")
    with ThreadPoolExecutor(max(NUM_CLIENTS)) as pool:
        for number in NUM_CLIENTS:
            until = time.monotonic() + SHOWN_S
            list(pool.map(ask_until, [running.url] * number, [until] * number))
        until = time.monotonic() + SHOWN_S
        asking = [pool.submit(ask_until, running.url, until) for _ in range(4)]
        page.wait_for_timeout(5000)
        shoot(page, "ring_light")
        phone = {"viewport": {"width": 375, "height": 800}, "has_touch": True, "is_mobile": True}
        small = open_page(f"{running.url}/#ring", **phone)
        await_tab(small, "ring")
        small.wait_for_timeout(4000)
        shoot(small, "ring_phone")
        small.close()
        dark = open_page(
            f"{running.url}/#ring", viewport={"width": 1120, "height": 960}, color_scheme="dark"
        )
        await_tab(dark, "ring")
        dark.wait_for_timeout(4000)
        worker = httpx.get(f"{running.url}/ring", headers=HEADERS).json()["workers"][0]
        os.kill(worker["pid"], signal.SIGKILL)
        dark.locator("[data-process='worker 0']").get_by_text("killed by SIGKILL").wait_for()
        shoot(dark, "ring_dark")
        for one in asking:
            one.result()
    assert running.stop() == 0


def ask_until(url: str, until: float) -> None:
    """Ask for completions, one after the other, whose prompts begin alike."""
    count = 0
    while time.monotonic() < until:
        count += 1
        prompt = "You answer questions about rivers, weirs and mills. " * 12
        prompt += f"Question {count}: where does river {threading.get_ident() % 97} rise?"
        body = {"prompt": prompt, "max_tokens": 40 + count % 3 * 30, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS).raise_for_status()
