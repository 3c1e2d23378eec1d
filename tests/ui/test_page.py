"""The frame of the page in Chromium: weight, key, connection, phones, axe; Try and /docs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import RunningServer
from web_page import KEY, ask, await_answer, await_tab, script_answers

ROOT = Path(__file__).parents[2]
AXE = ROOT / "frontend" / "ui" / "node_modules" / "axe-core" / "axe.min.js"
MAX_BYTES = 150_000  # of all that the page loads
PHONE = {"width": 360, "height": 740}
TABS = ("chat", "ring", "try")
ANSWER = [{"content": "Some *text*.\n\n```python\nx = 'a' + 1  # code\n```"}]
PATH = os.environ["PATH"]


def test_page_is_light_and_loads_from_its_server_alone(
    server: RunningServer, open_page: Callable[..., Any]
) -> None:
    page = open_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for tab in TABS:
        page.goto(f"{server.url}/#{tab}")
        page.get_by_role("navigation", name="Tabs").wait_for()
        await_tab(page, tab)
    assert all(url.startswith((server.url, "data:")) for url in asked)
    files = {url for url in asked if "/ui/" in url or url.endswith("/")}
    assert len(files) > 5
    with httpx.Client(headers={"accept": "text/html,*/*", "accept-encoding": "gzip"}) as client:
        sizes = [int(client.head(url).headers["content-length"]) for url in files]
    assert sum(sizes) < MAX_BYTES


def test_idle_page_asks_the_server_nothing(page: Any) -> None:
    ask(page)
    await_answer(page)
    page.clock.install()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.fast_forward("01:00:00")
    page.wait_for_load_state("networkidle")
    assert asked == []


def test_key_is_asked_for_once(server: RunningServer, open_page: Callable[..., Any]) -> None:
    page = open_page(server.url, key=None)
    page.get_by_text("This server needs an API key.").wait_for()
    page.get_by_label("Key", exact=True).fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("The server does not accept this key.").wait_for()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for(state="hidden")
    page.reload()
    ask(page)
    await_answer(page)
    assert page.locator(".answer .markdown").inner_text()
    assert page.get_by_role("dialog").count() == 0


def test_key_may_end_with_the_tab(server: RunningServer, open_page: Callable[..., Any]) -> None:
    page = open_page(server.url, key=None)
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_label("Keep it in this browser").uncheck()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for(state="hidden")
    assert KEY not in page.evaluate("JSON.stringify(localStorage)")


def test_cancelled_key_shows_the_refusal(
    server: RunningServer, open_page: Callable[..., Any]
) -> None:
    page = open_page(server.url, key=None)
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    ask(page)
    page.get_by_role("button", name="Cancel").click()
    assert "API key" in page.get_by_role("alert").inner_text()


def test_page_outlives_its_server(
    start: Callable[..., RunningServer], open_page: Callable[..., Any]
) -> None:
    first = start()
    try:
        page = open_page(first.url)
        ask(page)
        page.locator(".answer .markdown").wait_for()
    finally:
        first.process.kill()
        first.wait()
    page.get_by_text("The connection broke off").wait_for()
    page.get_by_text("The server does not answer.").wait_for()
    port = first.url.rpartition(":")[2]
    second = start("--port", port)
    page.get_by_text("The server does not answer.").wait_for(state="hidden")
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("40 tokens").wait_for()
    assert second.stop() == 0


def test_tab_without_its_file_offers_to_reload(page: Any) -> None:
    page.route("**/ui/try-*", lambda route: route.fulfill(status=404))
    page.get_by_role("link", name="Try").click()
    page.get_by_role("button", name="Load the page again").wait_for()
    page.unroute("**/ui/try-*")
    page.get_by_role("button", name="Load the page again").click()
    page.get_by_label("Example").wait_for()


def test_model_without_texts_is_named(server: RunningServer, open_page: Callable[..., Any]) -> None:
    page = open_page()
    told = json.dumps({"has_image_understanding": False, "is_generation": False})
    page.route("**/model_info", lambda route: route.fulfill(body=told))
    page.goto(server.url)
    page.get_by_role("heading", name="makes no texts").wait_for()


@pytest.mark.parametrize("tab", TABS)
def test_phone_needs_no_sideways_scrolling(
    server: RunningServer, open_page: Callable[..., Any], tab: str
) -> None:
    page = open_page(viewport=PHONE, has_touch=True, is_mobile=True)
    script_answers(page, [{"content": "`" + "word" * 60 + "`\n\n" + ANSWER[0]["content"]}])
    page.goto(f"{server.url}/#{tab}")
    if tab == "chat":
        ask(page)
        await_answer(page)
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Chats").click()
        page.get_by_role("button", name="New chat").click()
    await_tab(page, tab)
    width = page.evaluate("document.scrollingElement.scrollWidth")
    inner = page.evaluate("document.querySelector('main').scrollWidth")
    assert max(width, inner) <= PHONE["width"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(
    server: RunningServer, open_page: Callable[..., Any], theme: str
) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed; make ui-test installs it")
    page = open_page(server.url, color_scheme=theme)
    script_answers(page, ANSWER)
    assert faults(page) == []
    ask(page)
    await_answer(page)
    page.locator(".hljs-string").wait_for()
    page.get_by_role("button", name="Settings").click()
    assert faults(page) == []
    for tab in TABS[1:]:
        page.goto(f"{server.url}/#{tab}")
        page.get_by_role("heading", level=1).wait_for()
        await_tab(page, tab)
        assert faults(page) == []
    page.get_by_role("button", name="Send").click()
    page.get_by_text("Status 200").wait_for()
    assert faults(page) == []


def test_axe_finds_nothing_in_the_key_dialog(
    server: RunningServer, open_page: Callable[..., Any]
) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed; make ui-test installs it")
    page = open_page(server.url, key=None)
    page.get_by_role("dialog").wait_for()
    assert faults(page) == []


def faults(page: Any) -> list[str]:
    """Return what axe finds, by rule and element."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    return [f"{one['id']}: {node['html']}" for one in found for node in one["nodes"]]


def test_page_is_used_by_keyboard_alone(page: Any) -> None:
    page.get_by_label("Message", exact=True).fill("Where do rivers rise?")
    page.keyboard.press("Enter")
    await_answer(page)
    page.keyboard.press("Shift+Tab")
    seen = set()
    for _ in range(40):
        focused = page.evaluate(
            "document.activeElement.ariaLabel || document.activeElement.innerText"
        )
        seen.add(focused.strip())
        page.keyboard.press("Shift+Tab")
    assert {"Copy this answer", "Regenerate", "Settings", "New chat", "Try"} <= seen


def test_theme_is_chosen_and_kept(page: Any) -> None:
    page.get_by_role("button", name="Use dark colours").click()
    page.reload()
    page.get_by_role("button", name="Use light colours").wait_for()
    assert page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"


def test_try_sends_every_example(server: RunningServer, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{server.url}/#try")
    examples = page.get_by_label("Example")
    examples.locator("option").nth(3).wait_for(state="attached")
    titles = examples.locator("option").all_inner_texts()
    assert len(titles) > 8
    for title in titles:
        examples.select_option(label=title)
        body = json.loads(page.get_by_label("Body of POST").input_value())
        if "max_tokens" in body or "prompt" in body:
            with page.expect_response("**" + title.partition(":")[0]) as got:
                page.get_by_role("button", name="Send").click()
            assert got.value.status == 200, title
            page.get_by_role("button", name="Send").wait_for()


@pytest.mark.parametrize(
    ("language", "command"),
    [("curl", ["sh"]), ("Python", [sys.executable, "-"]), ("JavaScript", ["node", "-"])],
)
def test_try_shows_programs_that_run(
    server: RunningServer, open_page: Callable[..., Any], language: str, command: list[str]
) -> None:
    page = open_page(f"{server.url}/#try")
    page.get_by_label("Example").locator("option").nth(3).wait_for(state="attached")
    body = {"prompt": 'It\'s a "test" of $HOME', "max_tokens": 2, "stream": False, "echo": True}
    page.get_by_label("Body of POST").fill(json.dumps(body))
    page.get_by_label(language).check(force=True)
    program = page.locator(".try pre").first.inner_text()
    url = f"{server.url}/v1/completions"
    program = program.replace(f"{server.url}/v1/chat/completions", url)
    run = subprocess.run(
        command, input=program, capture_output=True, text=True, env={"API_KEY": KEY, "PATH": PATH}
    )
    assert run.returncode == 0, run.stderr
    text = json.loads(run.stdout)["choices"][0]["text"]
    assert text.startswith(body["prompt"])


def test_reference_sends_an_example(server: RunningServer, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{server.url}/docs", key=None)
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    page.get_by_text("does not accept").wait_for()
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    page.locator("#operations-Tokens-tokenize").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    response = page.locator(".live-responses-table .response-col_status").last
    assert response.inner_text().startswith("200")
