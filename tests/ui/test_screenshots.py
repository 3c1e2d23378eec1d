"""The pictures of docs/web_page.md: `make ui-test SCREENSHOTS=1`. The answers are scripted."""

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from servers import RunningServer
from web_page import ask, await_answer, shoot

WIDE, PHONE = {"width": 1120, "height": 800}, {"width": 375, "height": 800}
TOKEN_MS = 9
THOUGHTS = "The question has two parts: the reason, and a function. Keep both short."
ANSWER = """A river meanders because a bend feeds itself. Water is **faster along the outer \
bank**, which it erodes, and slower along the inner one, where it drops sand.

The *sinuosity* of a reach is its length along the water over the straight distance:

```python
from math import dist


def sinuosity(points: list[tuple[float, float]]) -> float:
    \"\"\"Return how much longer a river is than a straight line.\"\"\"
    along = sum(dist(a, b) for a, b in zip(points, points[1:]))
    return along / dist(points[0], points[-1])
```

Above **1.5** a river is said to meander.
"""
EARLIER = {"a": "A haiku about a weir", "b": "Translate a bill of lading", "c": "SQL for a gauge"}
# Answers chats token by token, as a server of a real model does.
STREAM = """
const answer = %s, thoughts = %s, delay = %d, real = window.fetch;
window.fetch = (url, init) => {
  if (!String(url).endsWith("v1/chat/completions")) return real(url, init);
  const deltas = [...thoughts.map((t) => ({ reasoning_content: t })),
                  ...answer.map((t) => ({ content: t }))];
  const encoder = new TextEncoder();
  const send = async (to) => {
    const event = (body) => to.enqueue(encoder.encode(`data: ${JSON.stringify(body)}\\n\\n`));
    await new Promise((done) => setTimeout(done, 4 * delay));
    for (const delta of deltas) {
      event({ choices: [{ delta, finish_reason: null }] });
      await new Promise((done) => setTimeout(done, delay));
    }
    event({ choices: [{ delta: {}, finish_reason: "stop" }] });
    event({ choices: [], usage: { completion_tokens: deltas.length } });
    to.close();
  };
  return Promise.resolve(new Response(new ReadableStream({ start: (to) => void send(to) })));
};
"""

pytestmark = pytest.mark.skipif(
    "SCREENSHOTS" not in os.environ, reason="make ui-test SCREENSHOTS=1"
)


def tokens(text: str) -> str:
    return json.dumps(re.findall(r"\s*\S+|\s+", text))


def conversation(page: Any) -> None:
    """Have a conversation, after some others."""
    page.evaluate(STREAM % (tokens("Done."), "[]", 0))
    for title in EARLIER.values():
        ask(page, title)
        await_answer(page)
        page.get_by_role("button", name="New chat").click()
    page.evaluate(STREAM % (tokens(ANSWER), tokens(THOUGHTS), TOKEN_MS))
    ask(page, "Why do rivers meander, and how do I measure it?")
    await_answer(page)
    page.locator(".hljs-keyword").first.wait_for()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chat_light", {"viewport": WIDE, "color_scheme": "light"}),
        ("chat_dark", {"viewport": WIDE, "color_scheme": "dark"}),
        ("chat_phone", {"viewport": PHONE, "color_scheme": "light", "has_touch": True}),
    ],
)
def test_chat_is_shot(
    server: RunningServer, open_page: Callable[..., Any], name: str, options: Any
) -> None:
    page = open_page(server.url, **(options | {"viewport": WIDE}))
    conversation(page)
    page.set_viewport_size(options["viewport"])
    if name == "chat_dark":
        page.get_by_role("button", name="Settings").click()
    page.locator(".messages").evaluate("(box) => (box.scrollTop = 0)")
    shoot(page, name)


def test_try_is_shot(server: RunningServer, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{server.url}/#try", viewport=WIDE)
    page.get_by_label("Example").locator("option").nth(3).wait_for(state="attached")
    shoot(page, "try_light")


def test_reference_is_shot(server: RunningServer, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{server.url}/docs", viewport=WIDE)
    page.locator("#operations-Generation-v1_chat_completions").wait_for()
    shoot(page, "api_reference")
