"""Allowed tools, custom tools and functions come to tools that a model is told of."""

import json
from typing import Any

import msgspec
import pytest
from planners import HTTP, make_planner

from headrace.errors import RequestError
from headrace.ipc.messages import GenerateRequest, Parsing, ResponsePlan
from headrace.model.output_formats import ToolFormat

TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
NOW = {"type": "function", "function": {"name": "now"}}
LOOK = {"type": "function", "function": {"name": "look"}}
RUN: dict[str, Any] = {"type": "custom", "custom": {"name": "run", "description": "Runs code"}}


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    held = {"syntax": syntax, "definition": definition}
    return {"name": "run", "format": {"type": "grammar", "grammar": held}}


DIGITS = {"type": "custom", "custom": grammar("regex", "[0-9]+")}
LARK = {"type": "custom", "custom": grammar("lark", 'start: "a"')}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}


def planned(kind: str = "chat", **fields: Any) -> tuple[str, GenerateRequest, ResponsePlan]:
    """Return the prompt of a request, its one sequence, and its plan."""
    start: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    if kind == "responses":
        start = {"input": "Hi"}
    planner = make_planner(2000, chat_template=TEMPLATE, tool_format=ToolFormat.HERMES)
    sequences = planner.plan(kind, HTTP, json.dumps(start | fields).encode())
    (request,), (prompt,) = sequences.requests, sequences.prompts
    plan = msgspec.msgpack.decode(request.plan, type=ResponsePlan)
    return bytes(prompt.tolist()).decode(), request, plan


def parsing_of(plan: ResponsePlan) -> Parsing:
    assert plan.parsing is not None
    return plan.parsing


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_a_prompt_has_the_allowed_tools_only() -> None:
    for mode in ("auto", "required"):
        prompt, request, _ = planned(tools=[NOW, LOOK, RUN], tool_choice=allowed(mode, LOOK, RUN))
        assert ("now" in prompt, "look" in prompt, "run" in prompt) == (False, True, True)
        assert bool(request.grammar) == (mode == "required")
    assert b"now" not in request.grammar
    assert b"look" in request.grammar


def test_allowed_tools_of_responses_are_a_chats() -> None:
    tools = [
        {"type": kind, "name": name} for kind, name in [("function", "now"), ("custom", "run")]
    ]
    choice = {"type": "allowed_tools", "mode": "required", "tools": tools[1:]}
    prompt, request, plan = planned("responses", tools=tools, tool_choice=choice)
    assert ("now" in prompt, "run" in prompt, b"run" in request.grammar) == (False, True, True)
    assert json.loads(plan.form.echo)["tool_choice"] == choice  # type: ignore[union-attr]


def test_a_custom_tool_is_a_function_of_one_string() -> None:
    prompt, _, plan = planned(tools=[RUN, NOW])
    (custom, _), _ = json.JSONDecoder().raw_decode(prompt)
    properties = {"input": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": ["input"]}
    function = {"name": "run", "description": "Runs code", "parameters": parameters}
    assert custom == {"type": "function", "function": function}
    assert parsing_of(plan).custom_tools == ["run"]


def test_a_regex_holds_where_a_custom_tool_is_demanded() -> None:
    prompt, request, plan = planned(tools=[DIGITS], tool_choice="required")
    assert "The input follows this regex grammar:" in prompt
    assert b'"pattern": "^(?:[0-9]+)$"' in request.grammar
    named = {"type": "custom", "custom": {"name": "run"}}
    _, request, named_plan = planned(tools=[DIGITS], tool_choice=named)
    assert b'"pattern": "^(?:[0-9]+)$"' in request.grammar
    assert [parsing_of(one).has_one_call for one in (plan, named_plan)] == [False, True]
    assert 'start: \\"a\\"' in planned(tools=[LARK])[0]


def test_custom_tools_of_responses_are_a_chats() -> None:
    held = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    tool = {"type": "custom", "name": "run", "format": held}
    wanted = {"type": "custom", "name": "run"}
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "custom_tool_call", "call_id": "c", "name": "run", "input": "12"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    prompt, request, _ = planned("responses", tools=[tool], tool_choice=wanted, input=items)
    chat = planned(
        tools=[DIGITS],
        tool_choice={"type": "custom", "custom": {"name": "run"}},
        messages=[
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "type": "custom", "custom": {"name": "run", "input": "12"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ],
    )
    assert (prompt, request.grammar) == (chat[0], chat[1].grammar)
    assert '"arguments": {"input": "12"}' in prompt


def test_functions_are_tools_by_their_old_name() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "rain"},
    ]
    prompt, request, plan = planned(functions=[FUNCTION], messages=messages)
    tool = {"type": "function", "function": FUNCTION}
    assert json.JSONDecoder().raw_decode(prompt)[0] == [tool]
    assert prompt.count('"call00001"') == 2
    assert '"role": "tool"' in prompt
    assert (request.grammar, plan.function_call, parsing_of(plan).has_one_call) == (b"", True, True)
    named = planned(functions=[FUNCTION], function_call={"name": "look"})[1]
    assert b"look" in named.grammar
    silent = planned(functions=[FUNCTION], function_call="none")
    assert ("look" in silent[0], silent[2].parsing) == (False, None)
    assert not planned(tools=[LOOK])[2].function_call


def test_a_message_keeps_a_function_call_beside_tool_calls() -> None:
    look, now = {"name": "look", "arguments": "{}"}, {"name": "now", "arguments": "{}"}
    calls = [{"id": "c", "type": "function", "function": now}]

    def prompt_of(function: dict[str, str]) -> str:
        said = {"role": "assistant", "tool_calls": calls, "function_call": function}
        answers = [
            {"role": "tool", "tool_call_id": "c", "content": "noon"},
            {"role": "function", "name": function["name"], "content": "calm"},
        ]
        return planned(messages=[said, *answers])[0]

    both, one = prompt_of(look), prompt_of(now)
    assert [both.count(word) for word in ('"id": "c"', '"id": "call00000"')] == [1, 1]
    assert both.index('"name": "now"') < both.index('"name": "look"')
    assert '"content": "calm", "name": "look", "tool_call_id": "call00000"' in both
    assert (one.count('"id": '), one.count('"tool_call_id": "c"')) == (1, 2), "the same call"


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (
            "chat",
            {"tools": [NOW], "tool_choice": allowed("auto", LOOK)},
            "tool_choice.allowed_tools.tools[0].function.name: 'look' is none",
        ),
        (
            "chat",
            {"tools": [NOW], "tool_choice": allowed("auto")},
            "tool_choice.allowed_tools.tools: must not be empty",
        ),
        ("chat", {"tool_choice": allowed("auto", LOOK)}, "tool_choice: there must be 'tools'"),
        (
            "chat",
            {"tools": [NOW], "tool_choice": allowed("never", NOW)},
            "tool_choice.allowed_tools.mode: must be 'auto' or 'required', not 'never'",
        ),
        (
            "chat",
            {"tools": [LARK], "tool_choice": "required"},
            "tools[0].custom.format: a 'lark' grammar",
        ),
        ("chat", {"tools": [RUN, RUN]}, "tools[1].custom.name: 'run' is there already"),
        ("chat", {"functions": [FUNCTION], "tools": [NOW]}, "functions: not together with 'tools'"),
        ("chat", {"functions": [FUNCTION] * 2}, "functions[1].name: 'look' is there already"),
        (
            "chat",
            {"functions": [FUNCTION], "function_call": {"name": "x"}},
            "function_call.name: 'x'",
        ),
        ("chat", {"function_call": {"name": "x"}}, "function_call: there must be 'functions'"),
        (
            "chat",
            {"tools": [NOW], "messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[0].tool_calls[0]: must have a 'function'",
        ),
        (
            "responses",
            {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]},
            "tools[0].format: a grammar needs 'definition' and 'syntax'",
        ),
        (
            "responses",
            {
                "tools": [{"type": "function", "name": "f"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tool_choice.tools[0].name: 'g' is none of the tools",
        ),
    ],
)
def test_a_choice_that_cannot_be_is_refused(kind: str, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        planned(kind, **fields)
    assert says in str(refused.value)
