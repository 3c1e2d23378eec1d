"""The page of a server in Chromium: what a test does there, and what the page complains of."""

import json
from pathlib import Path
from typing import Any

KEY = "a-key-of-the-tests"
DEADLINE_MS = 60_000
PICTURES = Path(__file__).parents[2] / "docs" / "screenshots"
MAX_PICTURE_BYTES = 150_000
Object = dict[str, Any]


class Console:
    """What a page complains of: violations of its policy among them."""

    def __init__(self, page: Any) -> None:
        self.complaints: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _hear(self, message: Any) -> None:
        is_of_network = "Failed to load resource" in message.text  # a 401, or no server
        if message.type in ("error", "warning") and not is_of_network:
            self.complaints.append(message.text)


def script_answers(page: Any, *answers: list[Object]) -> list[Object]:
    """Have a page get these answers to chats, by their deltas; return the bodies that it sends."""
    bodies: list[Object] = []

    def answer(route: Any) -> None:
        deltas = answers[min(len(bodies), len(answers) - 1)]
        bodies.append(json.loads(route.request.post_data))
        end = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
        chunks: list[Object] = [
            {"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas
        ]
        chunks.append({"choices": [{"delta": {}, "finish_reason": end}]})
        chunks.append({"choices": [], "usage": {"completion_tokens": len(deltas)}})
        events = [*map(json.dumps, chunks), "[DONE]"]
        text = "".join(f"data: {event}\n\n" for event in events)
        route.fulfill(content_type="text/event-stream", body=text)

    page.route("**/v1/chat/completions", answer)
    return bodies


def await_tab(page: Any, tab: str) -> None:
    """Wait until a tab has what it shows at first. The stream of Ring has no end."""
    if tab == "ring":
        page.locator("svg.ring").wait_for()
        page.get_by_role("heading", name="The last hour").wait_for()
    else:
        page.wait_for_load_state("networkidle")


def ask(page: Any, text: str = "Where do rivers rise?") -> None:
    """Send a message."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def await_answer(page: Any, number: int = 1) -> Any:
    """Wait until there are so many answers and the last is complete; return it."""
    answer = page.locator(".answer").nth(number - 1)
    answer.get_by_role("button", name="Regenerate").wait_for()
    return answer


def shoot(page: Any, name: str) -> None:
    """Take a picture for docs/web_page.md."""
    page.evaluate("document.activeElement.blur()")
    path = PICTURES / f"{name}.png"
    page.screenshot(path=path)
    assert path.stat().st_size < MAX_PICTURE_BYTES
