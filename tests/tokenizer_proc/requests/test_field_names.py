"""Errors name fields as the API of the request calls them."""

import json
import re
from typing import Any

import msgspec
import pytest
from planners import HTTP, make_planner

from headrace.errors import RequestError
from headrace.model.output_formats import ToolFormat
from headrace.tokenizer_proc.openapi.openapi import plain
from headrace.tokenizer_proc.requests.anthropic import MessagesRequest
from headrace.tokenizer_proc.requests.openai import ChatRequest, CompletionRequest
from headrace.tokenizer_proc.requests.responses import ResponsesRequest
from headrace.tokenizer_proc.requests.sglang import GenerateBody

KINDS: dict[str, Any] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
    "generate": GenerateBody,
    "messages": MessagesRequest,
    "responses": ResponsesRequest,
}
HI = [{"role": "user", "content": "Hi"}]
MINIMAL: dict[str, Any] = {
    "chat": {"messages": HI},
    "completion": {"prompt": "Hi"},
    "generate": {"text": "Hi"},
    "messages": {"messages": HI, "max_tokens": 9},
    "responses": {"input": "Hi"},
}
MANY = 5_000_000

VALUES = {"allowed_tools", "json_object", "json_schema", "structural_tag"}  # of `type`


def names_of(kind: type[msgspec.Struct]) -> set[str]:
    """Return the names of fields at any depth of a kind of body."""
    _, parts = msgspec.json.schema_components([plain(kind)])
    return {name for part in parts.values() for name in part.get("properties", {})}


def sampled(**params: Any) -> dict[str, Any]:
    return {"sampling_params": [params]} | {"text": ["Hi"]}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"max_completion_tokens": 9, "min_tokens": 16}),
    ("chat", {"max_completion_tokens": 100, "truncate_prompt_tokens": -1}),
    ("completion", {"max_tokens": 9, "min_tokens": 16}),
    ("generate", sampled(max_new_tokens=0, min_new_tokens=16)),
    ("generate", {"sampling_params": {"max_new_tokens": 9, "min_new_tokens": 16}}),
    ("generate", sampled(n=129)),
    ("generate", sampled(stop=[""])),
    ("generate", sampled(temperature=-1)),
    ("generate", sampled(top_p=0)),
    ("generate", sampled(stop_token_ids=[999])),
    ("generate", sampled(logit_bias={"x": 1})),
    ("generate", sampled(regex="a", ebnf="b")),
    ("generate", sampled(custom_params=1)),
    ("generate", {"return_logprob": True, "top_logprobs_num": 21}),
    ("generate", {"return_logprob": True, "logprob_start_len": 0, "stream": True}),
    ("generate", {"text": "x" * 200}),
    ("generate", {"priority": 1 << 40}),
    ("messages", {"max_tokens": 0}),
    ("messages", {"stop_sequences": [""]}),
    ("messages", {"temperature": -1}),
    ("messages", {"messages": [{"role": "user", "content": "x" * 200}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
    ("messages", {"tools": [{"name": "a b"}]}),
    ("messages", {"tools": [{"name": "a", "input_schema": {"type": "array"}}]}),
    ("messages", {"tool_choice": {"type": "any"}}),
    ("messages", {"tools": [{"name": "a"}], "tool_choice": {"type": "tool", "name": "b"}}),
    ("messages", {"tools": [{"name": "a"}]}),
    ("responses", {"max_output_tokens": 0}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "video"}]}]}),
    ("responses", {"input": "x" * 200}),
    ("responses", {"stop": [""]}),
    ("responses", {"top_p": 0}),
    ("responses", {"top_logprobs": 20, "max_output_tokens": MANY}),
    ("responses", {"include": ["message.output_text.logprobs"], "max_output_tokens": MANY}),
    ("responses", {"tools": [{"type": "function", "name": "a b"}]}),
    ("responses", {"tools": [{"type": "custom", "name": "a b"}]}),
    ("responses", {"tools": [{"type": "function", "name": "a", "parameters": {"type": 1}}]}),
    ("responses", {"tools": [{"type": "function", "name": "a"}], "tool_choice": {"type": "x"}}),
    (
        "responses",
        {
            "tools": [{"type": "function", "name": "a"}],
            "tool_choice": {"type": "custom", "name": "b"},
        },
    ),
    ("responses", {"text": {"format": {"type": "x"}}}),
    ("responses", {"text": {"format": {"type": "json_schema"}}}),
    ("responses", {"tools": [{"type": "function", "name": "a"}]}),
]


@pytest.mark.parametrize(("kind", "fields"), REFUSED)
def test_errors_name_fields_of_their_own_api(kind: str, fields: dict[str, Any]) -> None:
    check_refused(kind, fields)


@pytest.mark.parametrize("kind", ["chat", "messages", "responses"])
def test_errors_of_templates_name_own_fields(kind: str) -> None:
    check_refused(kind, {}, chat_template="{{ messages[9].role.x }}")
    check_refused(kind, {}, chat_template="{{ raise_exception('no') }}")
    tools = [{"name": "a"}, {"type": "function", "name": "a"}][kind == "responses"]
    fields: dict[str, Any] = {} if kind == "chat" else {"tools": [tools]}
    if fields:
        check_refused(kind, fields, tool_format=ToolFormat.MISTRAL)
    if kind == "messages":
        asked = {"messages": [*HI, {"role": "assistant", "content": "x"}]}
        check_refused(kind, asked, chat_template="{{ messages[0].content }}")


def check_refused(kind: str, fields: dict[str, Any], **model: Any) -> None:
    planner = make_planner(MANY if MANY in fields.values() else 100, **model)
    with pytest.raises(RequestError) as refused:
        planner.plan(kind, HTTP, json.dumps(MINIMAL[kind] | fields).encode())
    text, param, own = str(refused.value), refused.value.param or "", KINDS[kind]
    assert re.split(r"[.\[]", param)[0] in own.__struct_fields__
    assert text.startswith((f"{param}: ", "this model's maximum context length"))
    foreign = set[str]().union(*map(names_of, KINDS.values())) - names_of(own) - VALUES
    assert not set(re.findall("[a-z]+(?:_[a-z]+)+", text)) & foreign, text
