"""What the description says of messages and their parts is what the server takes, and no more."""

import dataclasses
import json
from functools import cache
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from planners import HTTP, make_planner

from headrace.errors import RequestError
from headrace.tokenizer_proc.openapi.openapi import openapi

ROLES = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}{{ tools }}"
)
TEXT = {"type": "text", "text": "x"}
NAMES = {"chat": "ChatRequest", "responses": "ResponsesRequest", "messages": "MessagesRequest"}
FILE = "data:text/plain;base64,eA=="
FUNCTION = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CUSTOM = {"type": "custom", "custom": {"name": "f", "input": "x"}}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "chat", {"messages": [{"role": "user", "content": "x"}]} | fields


def said(**message: Any) -> tuple[str, dict[str, Any]]:
    return "chat", {"messages": [{"role": "assistant"} | message]}


def item(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "responses", {"input": [fields]}


def block(**fields: Any) -> tuple[str, dict[str, Any]]:
    content = [TEXT, fields]
    return "messages", {"max_tokens": 5, "messages": [{"role": "user", "content": content}]}


def document(**source: Any) -> tuple[str, dict[str, Any]]:
    return block(type="document", source=source)


TAKEN = [
    chat(),
    chat(logprobs=True, top_logprobs=2),
    chat(top_logprobs=0),
    chat(continue_final_message=True, add_generation_prompt=False),
    chat(stream=True, stream_options={"include_usage": True}),
    chat(stream=False, prompt_logprobs=1),
    said(content=[TEXT]),
    said(content=[{"type": "file", "file": {"file_data": FILE, "filename": "a"}}]),
    said(tool_calls=[FUNCTION, CUSTOM, {"function": FUNCTION["function"]}]),
    said(function_call={"name": "f"}),
    said(content="x", tool_calls=[FUNCTION]),
    item(role="user", content="x"),
    item(type="message", role="user", content=[{"type": "input_text", "text": "x"}]),
    item(role="user", content=[{"type": "input_file", "file_data": FILE}]),
    item(type="function_call", name="f", arguments="{}"),
    item(type="custom_tool_call", name="f", input="x"),
    item(type="function_call_output", output="x"),
    item(type="reasoning", summary=[{"type": "summary_text", "text": "x"}]),
    item(type="reasoning", summary=[]),
    block(type="thinking", thinking="x"),
    block(type="redacted_thinking", data="x"),
    block(type="tool_use", name="f", input={}),
    block(type="tool_result", content=[TEXT]),
    document(type="text", data="x", media_type="text/plain"),
    document(type="base64", data="eA==", media_type="application/json"),
    document(type="content", content=[TEXT]),
]
REFUSED = [
    chat(top_logprobs=2),
    chat(logprobs=False, top_logprobs=2),
    chat(continue_final_message=True, add_generation_prompt=True),
    chat(stream_options={"include_usage": True}),
    chat(stream=True, prompt_logprobs=1),
    chat(model="another"),
    said(),
    said(content=None, tool_calls=[]),
    said(role="user", content=None, tool_calls=[FUNCTION]),
    said(tool_calls=[{"type": "function"}]),
    said(content=[{"type": "text"}]),
    said(content=[{"type": "text", "text": None}]),
    said(content=[{"type": "audio", "text": "x"}]),
    said(content=[{"type": "image_url", "image_url": {"url": "data:"}}]),
    said(content=[{"type": "file", "file": {}}]),
    said(content=[{"type": "file", "file": {"file_data": "x"}}]),
    said(content=[{"type": "file", "file": {"file_data": "data:image/png;base64,eA=="}}]),
    item(role="user"),
    item(content="x"),
    item(role="user", content=[{"type": "text"}]),
    item(role="user", content=[{"type": "input_image", "image_url": "data:"}]),
    item(type="function_call", name="f"),
    item(type="function_call", arguments="{}"),
    item(type="custom_tool_call", name="f"),
    item(type="web_search_call"),
    item(type="reasoning", summary=[TEXT]),
    block(type="image", source={"type": "url", "url": "data:"}),
    block(type="text"),
    block(type="thinking"),
    block(type="tool_use", name="f"),
    block(type="tool_use", input={}),
    block(type="tool_result", content=[{"type": "text"}]),
    block(type="document"),
    block(type="document", source={"type": "text", "data": "x"}, citations={"enabled": True}),
    document(type="file", data="x"),
    document(type="text"),
    document(type="text", data="x", media_type="image/png"),
    document(type="content"),
]


@cache
def description(takes_images: bool = False) -> Any:
    card = make_planner(chat_template=ROLES).generation._card
    if takes_images:
        card = dataclasses.replace(card, image_token=5)
    return msgspec.json.decode(openapi([card]))["components"]


def is_described(kind: str, body: Any, takes_images: bool = False) -> bool:
    """Whether the schema of a body allows it."""
    schema = {"$ref": f"#/components/schemas/{NAMES[kind]}"}
    components = description(takes_images)
    return Draft202012Validator(schema | {"components": components}).is_valid(body)


def is_taken(kind: str, body: Any) -> bool:
    """Whether a server plans a body."""
    try:
        make_planner(2000, chat_template=ROLES).plan(kind, HTTP, json.dumps(body).encode())
    except RequestError:
        return False
    return True


@pytest.mark.parametrize(("kind", "body"), TAKEN)
def test_what_is_described_is_taken(kind: str, body: Any) -> None:
    assert is_described(kind, body)
    assert is_taken(kind, body)


@pytest.mark.parametrize(("kind", "body"), REFUSED)
def test_what_is_refused_is_not_described(kind: str, body: Any) -> None:
    assert not is_taken(kind, body)
    assert not is_described(kind, body)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        said(content=[{"type": "image_url", "image_url": {"url": "data:"}}]),
        item(role="user", content=[{"type": "input_image", "image_url": "data:"}]),
        block(type="image", source={"type": "url", "url": "data:"}),
    ],
)
def test_images_are_described_where_they_are_taken(kind: str, body: Any) -> None:
    assert is_described(kind, body, takes_images=True)
