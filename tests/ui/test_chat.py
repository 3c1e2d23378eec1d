"""The Chat tab in Chromium: real streams of a mock, and scripted answers for what a mock lacks."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import RunningServer, wait_until
from web_page import KEY, ask, await_answer, script_answers

TEXT = """# Rivers

A *short* **text** with `code`, a [link](https://example.org/) and a [trap](javascript:alert(1)).

```python
def add(a: int, b: int) -> int:
    return a + b  # a sum
```

| river | km |
| --- | --: |
| Rhine | 1233 |

<img src="http://example.org/x.png" onerror="document.title='run'"> ![a](http://example.org/y.png)
"""
TOOLS = [{"type": "function", "function": {"name": "get_level", "parameters": {}}}]
CALL = {"index": 0, "id": "call_1", "function": {"name": "get_level", "arguments": '{"river":'}}
MORE = {"index": 0, "function": {"arguments": ' "Rhine"}'}}
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c63f8ffff3f0005fe02fea72d1d5f0000000049454e44ae426082"
)


def test_answer_streams_with_its_figures(page: Any) -> None:
    ask(page)
    page.get_by_role("button", name="Stop").wait_for()
    figures = await_answer(page).locator(".figures").inner_text()
    assert re.search(r"^[\d.,]+ tokens/s · first token .*s · 40 tokens · cut off", figures), figures
    page.get_by_role("button", name="Send").wait_for()


@pytest.fixture
def endless(server: RunningServer, open_page: Callable[..., Any]) -> Any:
    """A page whose answers end when they are stopped."""
    return open_page(server.url, max_tokens=2000)


def test_stop_keeps_what_has_come_and_continue_adds_to_it(endless: Any) -> None:
    ask(endless)
    text = endless.locator(".answer .markdown")
    text.wait_for()
    assert stop(endless).endswith("stopped")
    begun = text.inner_text()
    endless.get_by_role("button", name="Continue").click()
    wait_until(lambda: len(text.inner_text()) > len(begun), "more has come")
    assert stop(endless).endswith("stopped")
    assert text.inner_text().startswith(begun)


def test_stop_aborts_the_request(endless: Any, server: RunningServer) -> None:
    ask(endless)
    endless.locator(".answer .markdown").wait_for()
    stop(endless)
    wait_until(lambda: open_requests(server) == 1, "no other request is open")


def stop(page: Any) -> str:
    """Stop the answer that comes; return its figures."""
    page.get_by_role("button", name="Stop").click()
    figures: str = await_answer(page).locator(".figures").inner_text()
    return figures


def open_requests(server: RunningServer) -> float:
    """Return how many requests are open, this one among them."""
    headers = {"authorization": f"Bearer {KEY}"}
    text = httpx.get(f"{server.url}/metrics", headers=headers).text
    return sum(map(float, re.findall(r"^headrace:http_requests_open{.*} (\S+)$", text, re.M)))


def test_regenerate_and_edit_answer_anew(page: Any) -> None:
    bodies = script_answers(
        page, [{"content": "one"}], [{"content": "two"}], [{"content": "three"}]
    )
    ask(page, "first")
    await_answer(page).get_by_role("button", name="Regenerate").click()
    page.get_by_text("two", exact=True).wait_for()
    page.get_by_role("button", name="Edit your message").click()
    page.get_by_label("Edited text").fill("second")
    page.locator(".editor").get_by_role("button", name="Send").click()
    page.get_by_text("three", exact=True).wait_for()
    asked = [[message["content"] for message in body["messages"]] for body in bodies]
    assert asked == [["first"], ["first"], ["second"]]
    assert page.locator(".message").count() == 2


def test_edited_answer_is_what_the_model_has_said(page: Any) -> None:
    bodies = script_answers(page, [{"content": "one"}], [{"content": "two"}])
    ask(page, "first")
    await_answer(page).get_by_role("button", name="Edit this answer").click()
    page.get_by_label("Edited text").fill("other")
    page.get_by_role("button", name="Save").click()
    ask(page, "second")
    await_answer(page, 2)
    assert [message["content"] for message in bodies[1]["messages"]] == ["first", "other", "second"]


def test_reload_keeps_conversations(page: Any) -> None:
    ask(page, "Where do rivers rise?")
    await_answer(page)
    said = page.locator(".answer .markdown").inner_text()
    page.reload()
    assert await_answer(page).locator(".markdown").inner_text() == said
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("heading", name="Chat with").wait_for()
    page.get_by_role("button", name="Where do rivers rise?", exact=True).click()
    assert await_answer(page).locator(".markdown").inner_text() == said
    page.get_by_role("button", name="Delete Where do rivers rise?").click()
    page.get_by_role("heading", name="Chat with").wait_for()
    page.reload()
    page.get_by_role("heading", name="Chat with").wait_for()
    assert page.locator(".sidebar li").count() == 0


def test_reload_in_the_middle_keeps_what_has_come(page: Any) -> None:
    ask(page)
    page.locator(".answer .markdown", has_text=re.compile(r"(\w+\s+){10}")).wait_for()
    page.reload()
    answer = await_answer(page)
    assert answer.locator(".markdown").inner_text()
    assert answer.locator(".figures").inner_text().endswith("stopped")


def test_markdown_becomes_elements_and_never_html(page: Any) -> None:
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    script_answers(page, [{"content": piece} for piece in re.split(r"(?<=\s)", TEXT)])
    ask(page)
    answer = await_answer(page)
    assert answer.locator(".hljs-keyword").first.inner_text() == "def"
    assert answer.get_by_role("table").get_by_role("cell", name="Rhine").count() == 1
    links = answer.get_by_role("link").evaluate_all("all => all.map((a) => a.href)")
    assert links == ["https://example.org/", "http://example.org/y.png"]
    assert answer.locator("img").count() == 0
    assert "<img src=" in answer.inner_text()
    assert not [url for url in asked if "example.org" in url]


def test_code_is_copied_as_it_is(server: RunningServer, open_page: Callable[..., Any]) -> None:
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    script_answers(page, [{"content": TEXT}])
    ask(page)
    await_answer(page)
    page.get_by_role("button", name="Copy this code").click()
    page.get_by_text("Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "def add(a: int, b: int) -> int:\n    return a + b  # a sum"


def test_thoughts_and_calls_are_folded_and_results_sent(page: Any) -> None:
    thoughts = [{"reasoning_content": "It asks"}, {"reasoning_content": " for a level."}]
    calls = [{"tool_calls": [CALL]}, {"tool_calls": [MORE]}]
    bodies = script_answers(page, [*thoughts, *calls], [{"content": "It is high."}])
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools, as JSON").fill(json.dumps(TOOLS))
    page.get_by_role("button", name="Close").click()
    ask(page)
    answer = await_answer(page)
    assert not answer.get_by_text("It asks for a level.").is_visible()
    answer.get_by_text("Thoughts").click()
    answer.get_by_text("It asks for a level.").wait_for()
    answer.get_by_text("Call of").click()
    assert json.loads(answer.locator("pre").inner_text()) == {"river": "Rhine"}
    page.get_by_label("Result of get_level").fill('{"level": 4}')
    page.get_by_role("button", name="Send results").click()
    page.get_by_text("It is high.").wait_for()
    assert bodies[0]["tools"] == TOOLS
    called, result = bodies[1]["messages"][-2:]
    assert called["tool_calls"][0]["function"]["arguments"] == '{"river": "Rhine"}'
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": '{"level": 4}'}


def test_settings_are_sent_and_kept(page: Any) -> None:
    bodies = script_answers(page, [{"content": "one"}])
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Stop texts").fill("a\nb c")
    others = page.get_by_label("Other fields")
    others.fill("{")
    page.get_by_text("The field is left out.").wait_for()
    others.fill('{"min_tokens": 2}')
    page.reload()
    ask(page, "first")
    await_answer(page)
    expected = {"temperature": 0.5, "stop": ["a", "b c"], "min_tokens": 2, "max_tokens": 40}
    assert bodies[0].items() >= expected.items()
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_images_are_sent_with_a_message(
    server: RunningServer, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "pixel.png").write_bytes(PIXEL)
    page = open_page()
    told = json.dumps({"has_image_understanding": True, "is_generation": True})
    page.route("**/model_info", lambda route: route.fulfill(body=told))
    bodies = script_answers(page, [{"content": "A pixel."}])
    page.goto(server.url)
    page.get_by_label("Images").set_input_files(tmp_path / "pixel.png")
    page.get_by_role("img", name="pixel.png").wait_for()
    ask(page, "What is this?")
    await_answer(page)
    image, text = bodies[0]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "What is this?"}


def test_conversation_is_exported(page: Any, tmp_path: Path) -> None:
    script_answers(page, [{"content": TEXT}])
    ask(page, "Where do rivers rise?")
    await_answer(page)
    for name, path in (("Export .md", "chat.md"), ("Export .json", "chat.json")):
        with page.expect_download() as started:
            page.get_by_role("button", name=name).click()
        assert started.value.suggested_filename == f"where-do-rivers-rise.{path[5:]}"
        started.value.save_as(tmp_path / path)
    assert TEXT in (tmp_path / "chat.md").read_text()
    exported = json.loads((tmp_path / "chat.json").read_text())
    assert [message["role"] for message in exported["messages"]] == ["user", "assistant"]
    assert KEY not in (tmp_path / "chat.json").read_text()


def test_refusal_is_shown_beside_the_question(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Top p").fill("7")
    ask(page)
    assert "top_p" in page.get_by_role("alert").inner_text()
