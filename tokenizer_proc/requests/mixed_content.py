"""Content of other APIs' messages, text and images, as a chat has it. Pure.

Errors name an image as a chat does; `image_names` says what its client calls it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any

from headrace.tokenizer_proc.requests.openai import IMAGE_PART

Object = dict[str, Any]
Content = str | list[Object]  # of a message: a text, or parts
CAME_AS = "came_as"  # of an image part, the field that it was; chats know of no such field


def text_part(text: str) -> Object:
    """Return a part that is text."""
    return {"type": "text", "text": text}


def image_part(url: str, detail: str, came_as: str) -> Object:
    """Return a part that is an image."""
    return {"type": IMAGE_PART, IMAGE_PART: {"url": url, "detail": detail}, CAME_AS: came_as}


def plain(parts: list[Object]) -> Content:
    """Return parts as a message's content: a text, its parts on lines of their own, if all are."""
    if any(part["type"] == IMAGE_PART for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def with_runs_joined(messages: Iterable[Object], role_of: Callable[[Object], str]) -> list[Object]:
    """Return messages with each run of one role as one message.

    Args:
        role_of: the role of a message that may be joined; "" for one that stands alone.
    """
    found = []
    for role, run in groupby(messages, role_of):
        first, *others = run
        if role and others:
            found.append(first | {"content": joined([one["content"] for one in (first, *others)])})
        else:
            found += [first, *others]
    return found


def joined(contents: Sequence[Content]) -> Content:
    """Return the content of several messages as one's. Texts before the first parts are one."""
    texts = list(takewhile(lambda one: isinstance(one, str), contents))
    parts = [part for one in contents[len(texts) :] for part in parts_of(one)]
    text = "\n".join(map(str, texts))
    return [*([text_part(text)] if texts else []), *parts] if parts else text


def parts_of(content: Content) -> list[Object]:
    """Return content as parts."""
    return [text_part(content)] if isinstance(content, str) else content


def image_names(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what the images of a chat are called where they came, by their names in the chat."""
    found = {
        f"messages[{i}].content[{j}].{IMAGE_PART}": part[CAME_AS]
        for i, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for j, part in enumerate(message["content"])
        if CAME_AS in part
    }
    details = {f"{ours}.detail": detail_of(given) for ours, given in found.items()}
    return found | details


def detail_of(came_as: str) -> str:
    """Return the field that says how closely an image is looked at: the one beside its own."""
    return f"{came_as.rpartition('.')[0]}.detail"
