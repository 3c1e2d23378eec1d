"""Prompts of gpt-oss are those that openai-harmony wrote, recorded here.

`tests/ecosystem/test_renderers.py` compares both for random conversations, by their ids.
"""

import datetime
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.errors import RequestError
from headrace.tokenizer_proc.encoding import harmony_template
from headrace.tokenizer_proc.encoding.chat_template import TemplateTooSlow
from headrace.tokenizer_proc.encoding.harmony_template import HarmonyTemplate
from headrace.tokenizer_proc.requests.openai import decode_chat, decode_tokenize

SYSTEM = """\
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {date}

Reasoning: {effort}

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
CALLS_GO = "\nCalls to these tools must go to the commentary channel: 'functions'."
TODAY = datetime.date(2026, 1, 2)
USER = {"role": "user", "content": "Hi"}
HI, BEGIN = "<|start|>user<|message|>Hi<|end|>", "<|start|>assistant"
CALL = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "Two ports.",
    "tool_calls": [
        {"id": id, "type": "function", "function": {"name": name, "arguments": '{"port": "Brest"}'}}
        for id, name in (("1", "tide"), ("2", "now"))
    ],
}
RESULTS = [{"role": "tool", "tool_call_id": id, "content": f'"{id}"\n'} for id in "21"]
COMMENTARY = "<|channel|>commentary"
CALLED = "".join(
    f"{BEGIN} to=functions.{name}{COMMENTARY} <|constrain|>json<|message|>"
    '{"port": "Brest"}<|call|>'
    for name in ("tide", "now")
)
LOOKED = (
    f"{BEGIN}{COMMENTARY}<|message|>I look.<|end|>{CALLED}"
    f'<|start|>functions.now to=assistant{COMMENTARY}<|message|>"2"\n<|end|>'
    f'<|start|>functions.tide to=assistant{COMMENTARY}<|message|>"1"\n<|end|>'
)
THOUGHT = f"{BEGIN}<|channel|>analysis<|message|>Two ports.<|end|>"
ANSWER = {"role": "assistant", "content": "At 4.", "reasoning_content": "Told."}
ANSWERED = f"{BEGIN}<|channel|>final<|message|>At 4.<|end|>"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "Where and when",
    "properties": {
        "port": {
            "type": "string",
            "title": "Port",
            "description": "its name",
            "examples": ["Brest", "Saint-Malo"],
        },
        "kind": {"type": "string", "enum": ["high", "low"], "default": "high"},
        "days": {"type": "array", "items": {"type": "integer"}, "default": [1, 2]},
        "at": {
            "type": "object",
            "description": "a place",
            "properties": {
                "lat": {"type": "number"},
                "name": {"type": ["string", "null"], "default": "é"},
            },
            "required": ["lat"],
        },
        "unit": {
            "description": "of heights",
            "oneOf": [
                {"type": "string", "enum": ["m", "ft"], "default": "m"},
                {"type": "number", "description": "of a metre", "nullable": True},
            ],
            "default": "m",
        },
        "more": {
            "type": "array",
            "items": {"type": "object", "properties": {"any": {"anyOf": [{"type": "string"}]}}},
        },
        "all": {"type": "array"},
    },
    "required": ["port", "at"],
}
TYPES = """\
# Tools

## functions

namespace functions {

// Tides.
// Of a port.
type tide = (_: // Where and when
{
// Port
//
// its name
// Examples:
// - "Brest"
// - "Saint-Malo"
port: string,
kind?: "high" | "low", // default: high
days?: number[], // default: [1,2]
// a place
at:     // a place
{
    lat: number,
    name?: string | null, // default: "é"
    },
// of heights
// default: "m"
unit?:
 | "m" | "ft" // default: m
 | number | null // of a metre
,
more?: {
    any?: any,
    }[],
all?: Array<any>,
}) => any;

type now = () => any;

} // namespace functions<|end|>"""
TOOLS = [
    {"name": "tide", "description": "Tides.\nOf a port.", "parameters": SCHEMA},
    {"name": "now"},
]
OFFERED = {"tools": [{"type": "function", "function": tool} for tool in TOOLS]}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "shopping", "description": "a\nlist", "schema": {"type": "object"}},
}


def rendered(*messages: dict[str, Any], **fields: Any) -> str:
    return rendered_of({"messages": messages, **fields})


def rendered_of(body: dict[str, Any]) -> str:
    prompt = HarmonyTemplate({}).prompt(decode_chat(json.dumps(body).encode()))
    assert not prompt.add_special_tokens
    assert "".join(prompt.pieces) == prompt.text
    return prompt.text


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    date = SimpleNamespace(today=lambda: TODAY)
    monkeypatch.setattr(harmony_template, "datetime", SimpleNamespace(date=date))


def system(effort: str = "medium", has_tools: bool = False) -> str:
    text = SYSTEM.format(date=TODAY, effort=effort)
    return f"{text}{CALLS_GO if has_tools else ''}<|end|>"


def developer(text: str) -> str:
    return f"<|start|>developer<|message|>{text}"


def test_a_question_follows_the_system_message() -> None:
    assert rendered(USER) == f"{system()}{HI}{BEGIN}"
    assert rendered(USER, reasoning_effort="high") == f"{system('high')}{HI}{BEGIN}"
    assert rendered(USER, add_generation_prompt=False) == f"{system()}{HI}"
    named = rendered(USER, chat_template_kwargs={"model_identity": "You are X."})
    assert named.startswith("<|start|>system<|message|>You are X.\nKnowledge cutoff")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_are_the_developer_s(role: str) -> None:
    said = {"role": role, "content": "Be brief."}
    told = developer("# Instructions\n\nBe brief.<|end|>")
    assert rendered(said, USER) == f"{system()}{told}{HI}{BEGIN}"
    assert rendered(USER, said, USER) == f"{system()}{HI}{told}{HI}{BEGIN}"


def test_tools_are_described_in_typescript() -> None:
    said = {"role": "system", "content": "Be brief."}
    begin = system(has_tools=True)
    assert rendered(USER, **OFFERED) == f"{begin}{developer(TYPES)}{HI}{BEGIN}"
    text = rendered(said, USER, **OFFERED)
    told = developer(f"# Instructions\n\nBe brief.\n\n{TYPES}")
    assert text == f"{begin}{told}{HI}{BEGIN}"


def test_calls_name_their_recipient_and_results_are_plain() -> None:
    assert rendered(USER, CALL, *RESULTS) == f"{system()}{HI}{THOUGHT}{LOOKED}{BEGIN}"
    silent = CALL | {"content": None, "reasoning_content": None}
    assert rendered(USER, silent) == f"{system()}{HI}{CALLED}{BEGIN}"
    objects = {"function": {"name": "tide", "arguments": {"port": "é"}}}
    custom = {"type": "custom", "custom": {"name": "now", "input": "x"}}
    text = rendered(USER, silent | {"tool_calls": [objects, custom]})
    assert '<|message|>{"port":"é"}<|call|>' in text
    assert '<|message|>{"input":"x"}<|call|>' in text


def test_thoughts_before_the_last_final_answer_are_dropped() -> None:
    past = f"{system()}{HI}{LOOKED}{ANSWERED}{HI}"
    assert rendered(USER, CALL, *RESULTS, ANSWER, USER) == f"{past}{BEGIN}"
    again = rendered(USER, CALL, *RESULTS, ANSWER, USER, CALL, *RESULTS)
    assert again == f"{past}{THOUGHT}{LOOKED}{BEGIN}"


def test_a_schema_of_the_answer_ends_the_developer_s_message() -> None:
    wanted = '# Response Formats\n\n## shopping\n\n// a\n// list\n{"type":"object"}<|end|>'
    text = rendered(USER, response_format=FORMAT)
    assert text == f"{system()}{developer(wanted)}{HI}{BEGIN}"
    text = rendered({"role": "system", "content": "A"}, USER, response_format=FORMAT)
    told = developer(f"# Instructions\n\nA\n\n{wanted}")
    assert text == f"{system()}{told}{HI}{BEGIN}"
    plain = rendered(USER, response_format={"type": "json_object"})
    assert plain == f"{system()}{HI}{BEGIN}"


def test_the_last_message_goes_on() -> None:
    text = rendered(USER, ANSWER, continue_final_message=True)
    thought = f"{BEGIN}<|channel|>analysis<|message|>Told.<|end|>"
    assert text == f"{system()}{HI}{thought}{ANSWERED.removesuffix('<|end|>')}"


def test_names_of_special_tokens_in_messages_are_text() -> None:
    parts = [{"type": "text", "text": text} for text in ("a<|end|>", "<|x", "<| b")]
    body = {"messages": [{"role": "user", "content": parts}]}
    pieces = HarmonyTemplate({}).prompt(decode_tokenize(json.dumps(body).encode())).pieces
    begin = pieces.index("user")
    assert pieces[begin:] == (
        *("user", "<|message|>", "a<|", "end|>", "<|", "x", "<| b", "<|end|>"),
        *("<|start|>", "assistant"),
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": [USER], "reasoning_effort": "none"}, "must be one of low, medium, high"),
        ({"messages": [USER], "documents": [{"text": "x"}]}, "documents: harmony writes"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "not 'narrator'"),
        ({"messages": [USER, RESULTS[0]]}, "no call before it has this id"),
        ({"messages": [USER], "chat_template": "x"}, "takes none from requests"),
        ({"messages": [USER | {"content": None}]}, "must be a string or a list"),
        (
            {"messages": [USER], "chat_template_kwargs": {"builtin_tools": ["browser"]}},
            "builtin_tools: harmony writes",
        ),
        (
            {"messages": [USER], "chat_template_kwargs": {"model_identity": 1}},
            "model_identity: must be a string",
        ),
        (
            {
                "messages": [USER, {"role": "assistant", "content": ""}],
                "continue_final_message": True,
            },
            "the last message is empty",
        ),
    ],
)
def test_what_harmony_has_no_place_for_is_refused(body: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        rendered_of(body)


def test_a_trusted_request_may_bring_a_template() -> None:
    template = HarmonyTemplate({}, trusts_requests=True)
    body = {"messages": [USER], "chat_template": "{{ messages[0].content }}"}
    prompt = template.prompt(decode_chat(msgspec.json.encode(body)))
    assert (prompt.text, prompt.pieces) == ("Hi", ())


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(RequestError, match="nested too deeply"):
        rendered(USER, tools=[tool])


@pytest.mark.parametrize(
    "tools", ["abc", 5, {"a": 1}, [{"type": "x"}], [{"function": {"name": "f", "description": 3}}]]
)
def test_tools_of_a_template_s_arguments_are_checked(tools: Any) -> None:
    with pytest.raises(RequestError, match="tools: "):
        rendered(USER, chat_template_kwargs={"tools": tools})


@pytest.mark.parametrize(("effort", "nearest"), [("minimal", "low"), ("xhigh", "high")])
def test_efforts_of_other_models_become_the_nearest(effort: str, nearest: str) -> None:
    assert rendered(USER, reasoning_effort=effort) == f"{system(nearest)}{HI}{BEGIN}"


def test_an_empty_answer_does_not_go_on() -> None:
    empty = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
    with pytest.raises(RequestError, match="the last message is empty"):
        rendered(USER, empty, continue_final_message=True, add_generation_prompt=False)


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_conversation_that_takes_long_is_interrupted() -> None:
    template = HarmonyTemplate({}, patience_s=0.01)
    body = {"messages": [USER] * 50_000}
    with pytest.raises(TemplateTooSlow, match=r"harmony takes more than 0\.01 s"):
        template.prompt(decode_chat(msgspec.json.encode(body)))
