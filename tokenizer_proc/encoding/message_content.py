"""Content of a chat's messages as templates expect it: a text, or parts, some of them images."""

from typing import Any

from headrace.errors import InvalidValue, Unsupported
from headrace.tokenizer_proc.requests.openai import (
    IMAGE_PART,
    ContentPart,
    RequestMessage,
    text_of,
)


def plain_text(message: RequestMessage, where: str) -> str | None:
    """Return the text of a message, its parts on lines of their own; calls need none."""
    if message.content is None and message.role == "assistant" and message.tool_calls:
        return None
    if message.content is None:
        raise InvalidValue(f"{where}: must be a string or a list of text parts", where)
    return text_of(message.content, where)


def with_images(message: RequestMessage, where: str, image_text: str) -> str:
    """Return the text of a message of parts, each on a line of its own, images as `image_text`."""
    return "\n".join(part.get("text", image_text) for part in parts_of(message, where))


def parts_of(message: RequestMessage, where: str) -> list[dict[str, str]]:
    """Return the parts of a message; a text is one."""
    if not isinstance(message.content, list):
        text = plain_text(message, where)
        return [] if text is None else [{"type": "text", "text": text}]
    return [part_of(part, f"{where}[{i}]") for i, part in enumerate(message.content)]


def part_of(part: ContentPart, where: str) -> dict[str, str]:
    """Return a part: text, or an image, of which a template needs no more than its place."""
    if part.type not in ("text", IMAGE_PART):
        raise Unsupported(f"{where}: this model takes text and images, not '{part.type}'", where)
    if part.type == IMAGE_PART:
        return {"type": "image"}
    return {"type": "text", "text": text_of([part], where)}


def add_text(message: dict[str, Any], text: str) -> None:
    """Add a text to the end of a template's message."""
    content = message["content"]
    if not isinstance(content, list):
        message["content"] = (content or "") + text
    elif content and content[-1]["type"] == "text":
        content[-1]["text"] += text
    else:
        content.append({"type": "text", "text": text})
