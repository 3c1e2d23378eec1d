"""Requests of many kinds, sent at once, and their responses, however split into events."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
from servers import RunningServer

STORY = {"role": "user", "content": "Tell me a story about a fox."}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
OPEN = {"max_tokens": 48, "ignore_eos": True, "stream": True}
COUNTED = {"stream_options": {"include_usage": True}}
TALK = OPEN | {"messages": [STORY]}
TEXT = OPEN | {"prompt": "Once upon a time"}
JSON_SCHEMA = {"name": "person", "schema": SCHEMA, "strict": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, TALK | {"temperature": 0}),
    (CHAT, TALK | {"temperature": 1, "seed": 1}),
    (CHAT, TALK | COUNTED | {"temperature": 1, "seed": 2, "n": 2}),
    (CHAT, TALK | COUNTED | {"seed": 3, "frequency_penalty": 1.5, "top_p": 0.9, "stop": ["the"]}),
    (CHAT, TALK | {"temperature": 0, "logprobs": True, "top_logprobs": 3}),
    (CHAT, TALK | COUNTED | {"seed": 4}),
    (
        CHAT,
        TALK
        | COUNTED
        | {"seed": 4, "ignore_eos": False}
        | {"response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA}},
    ),
    (COMPLETION, TEXT | COUNTED | {"temperature": 0, "return_token_ids": True}),
    (COMPLETION, TEXT | {"temperature": 0, "stream": False, "logprobs": 2}),
    (COMPLETION, TEXT | {"seed": 5, "stream": False, "n": 2, "best_of": 3}),
    (
        "/v1/responses",
        {"input": "Tell me a story.", "max_output_tokens": 48, "stream": True, "temperature": 0},
    ),
    ("/v1/messages", {"messages": [STORY], "max_tokens": 48, "temperature": 0, "stream": True}),
    (
        "/generate",
        {"text": "A fox", "sampling_params": {"max_new_tokens": 48, "temperature": 0}}
        | {"stream": True},
    ),
]
TIMEOUT_S = 600  # of an answer, which is late where processes die
NOT_COMPARED = ("created", "created_at", "completed_at", "id", "item_id", "sequence_number")
# Texts and lists that go on in later events, and a name that comes once.
GROWING = (".content", ".text", ".delta", ".arguments", ".function[].name", "_ids")


def gather(found: dict[str, Any], part: Any, path: str) -> None:
    """Merge an event by key: texts and lists grow, other values are replaced."""
    if isinstance(part, dict):
        for name, value in part.items():
            if name in ("usage", "meta_info") and value is not None:
                found[f"{path}.usage"] = counts_of(value)
            elif name not in NOT_COMPARED:
                gather(found, value, f"{path}[{part.get('index', '')}].{name}")
    elif isinstance(part, list) and path.endswith("].logprobs[].content"):
        found[path] = found.get(path, []) + part
    elif isinstance(part, list) and part and isinstance(part[0], dict):
        for place, one in enumerate(part):
            gather(found, one, path if "index" in one else f"{path}{place}")
    elif isinstance(part, str | list) and path.endswith(GROWING):
        found[path] = found[path] + part if found.get(path) else part
    elif part is not None:
        found[path] = part


def counts_of(usage: dict[str, Any]) -> dict[str, Any]:
    """Return how many tokens there were, wherever they came from, and why there are no more."""
    counts = {
        name: value
        for name, value in usage.items()
        if name == "finish_reason" or (name.endswith("_tokens") and not name.startswith("cache"))
    }
    if "cache_read_input_tokens" in usage:  # Anthropic's `input_tokens` are those of no cache
        counts["input_tokens"] += usage["cache_read_input_tokens"]
    return counts


async def read(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], seen: Callable[[], None]
) -> dict[str, Any]:
    """Return the content of a response, however split into events."""
    found: dict[str, Any] = {}
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            seen()
            if line.startswith(("data: {", "{")):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event or event["error"] is None, event
                if path == "/generate":  # each event has all of the text so far
                    found |= {name: event.pop(name) for name in ("text", "output_ids")}
                gather(found, event, event.get("type", ""))
    return found


async def read_all(
    url: str,
    seen: Callable[[], None] = lambda: None,
    num_requests: int = len(REQUESTS),
    **fields: Any,
) -> list[Any]:
    """Return what the first requests are answered, sent at once; `fields` are more of each."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        return await asyncio.gather(
            *(read(client, path, body | fields, seen) for path, body in REQUESTS[:num_requests]),
            return_exceptions=True,
        )


def answers_of(*flags: str) -> list[Any]:
    """Return the answers of a server of its own, undisturbed."""
    running = RunningServer(*flags)
    answers = asyncio.run(read_all(running.url))
    assert running.stop() == 0
    return answers


def difference(answers: list[Any], expected: list[Any]) -> list[Any]:
    """Return what differs, and how."""
    failures = [answer for answer in answers if isinstance(answer, Exception)]
    assert not failures, failures
    return [
        (REQUESTS[i], name, answer.get(name), other.get(name))
        for i, (answer, other) in enumerate(zip(answers, expected, strict=True))
        for name in answer.keys() | other.keys()
        if answer.get(name) != other.get(name)
    ]
