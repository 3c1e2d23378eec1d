"""Tools and thoughts through a whole server, with OpenAI's client and Anthropic's.

The demo model calls no tools by itself. Where it is free to, what it says is prescribed by a
grammar that leaves one text. Its thoughts are not: it repeats those that its prompt is full of.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from examples import blocks
from servers import RunningServer
from weather_tool import TEMPLATE, WEATHER, check_weather

from headrace.client.client import Client

MODEL = "SmolLM2-135M-Instruct"
AT_ONCE = {"chat_template_kwargs": {"enable_thinking": False}}  # it would think for long
NOW: Any = {"type": "function", "function": {"name": "now"}}
QUESTION: Any = [{"role": "user", "content": "What is the weather in Oslo, and the time?"}]
ARGUMENTS = '{"city": "Oslo", "unit": "C"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
THOUGHTS = "<think>\nHm, two calls.\n</think>\n\n"
SCRIPT = {
    "structured_outputs": {"choice": [f"One moment.\n{CALL}{CALL.replace('Oslo', 'Bø')}"]},
    "chat_template": TEMPLATE + 8 * f"{THOUGHTS}One moment.\n",
    "temperature": 0,
}


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    running = RunningServer(
        *("--chat-template", str(template), "--trust-request-chat-template"),
        *("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
    )
    yield running
    assert running.stop() == 0


@pytest.fixture
def client(tool_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none") as client:
        yield client


def ask(client: openai.OpenAI, extra: dict[str, Any] = AT_ONCE, **fields: Any) -> Any:
    arguments = {"model": MODEL, "messages": QUESTION, "max_tokens": 150}
    arguments |= {"tools": [WEATHER, NOW], "seed": 1} | fields
    return client.chat.completions.create(**arguments, extra_body=extra)


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(client, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    assert (call.type, call.function.name) == ("function", "get_weather")
    check_weather(call.function.arguments)


@pytest.mark.parametrize("n", [1, 3])
def test_some_tool_is_called_where_one_is_required(client: openai.OpenAI, n: int) -> None:
    for answer in ask(client, tool_choice="required", parallel_tool_calls=False, n=n).choices:
        (call,) = answer.message.tool_calls
        if call.function.name == "get_weather":
            check_weather(call.function.arguments)
        else:
            assert call.function == openai.types.chat.chat_completion_message_tool_call.Function(
                name="now", arguments="{}"
            )


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(client, **fields).choices[0].message.tool_calls[0].function
    name, arguments, ends = "", "", []
    for chunk in ask(client, stream=True, **fields):
        (choice,) = chunk.choices
        ends += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (name, arguments) == (whole.name, whole.arguments)
    assert ends == ["tool_calls"]


def test_calls_are_found_in_what_the_model_says(client: openai.OpenAI) -> None:
    told = ask(client, SCRIPT)
    (answer,) = told.choices
    assert answer.finish_reason == "tool_calls"
    num_thought = told.usage.completion_tokens_details.reasoning_tokens
    assert 0 < num_thought <= len("Hm, two calls.\n")
    assert answer.message.reasoning_content == "Hm, two calls.\n"
    assert answer.message.content == "One moment.\n"
    calls = [call.function for call in answer.message.tool_calls]
    assert [call.name for call in calls] == ["get_weather"] * 2
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Oslo", "Bø"]
    assert len({call.id for call in answer.message.tool_calls}) == 2


def test_a_script_streams_at_once(client: openai.OpenAI) -> None:
    thoughts, content = "", ""
    calls: dict[int, list[str]] = {}
    for chunk in ask(client, SCRIPT, stream=True):
        delta = chunk.choices[0].delta
        thoughts += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        for call in delta.tool_calls or []:
            calls.setdefault(call.index, []).append(call.function.arguments)
    assert (thoughts, content) == ("Hm, two calls.\n", "One moment.\n")
    assert ["".join(parts) for parts in calls.values()] == [
        ARGUMENTS,
        ARGUMENTS.replace("Oslo", "Bø"),
    ]
    assert all(len(parts) > 3 for parts in calls.values()), "arguments come as they are written"


def test_without_tools_the_same_words_are_words(client: openai.OpenAI) -> None:
    answer = ask(client, SCRIPT, tool_choice="none").choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.tool_calls is None
    assert answer.message.content.endswith("</tool_call>\n")


def test_a_conversation_goes_on_with_the_results(tool_server: RunningServer) -> None:
    with Client(tool_server.url) as client:
        options = {"tools": [WEATHER, NOW], "max_tokens": 100}
        answer = client.chat(QUESTION, **options, **SCRIPT)
        told = answer.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
            for call in answer.tool_calls
        ]
        assert len(results) == 2
        after = client.chat([*QUESTION, told, *results], **options, **SCRIPT)
        assert after.usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_message_describes_tools_to_a_template(tool_server: RunningServer) -> None:
    body = {
        "messages": QUESTION,
        "tools": [NOW],
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        "max_tokens": 1,
    }
    lengths = []
    for choice in ("auto", "none"):
        url = f"{tool_server.url}/v1/chat/completions"
        answer = httpx.post(url, json=body | {"tool_choice": choice}, timeout=300)
        assert answer.status_code == 200
        lengths.append(answer.json()["usage"]["prompt_tokens"])
    assert lengths[0] > lengths[1] + 50


def test_a_schema_that_cannot_be_followed_is_refused(tool_server: RunningServer) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": QUESTION, "tools": [tool]}
    refused = httpx.post(
        f"{tool_server.url}/v1/chat/completions", json=body | {"tool_choice": "required"}
    )
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == "tool_choice"


# Anthropic's client


def as_anthropic(tool: Any) -> Any:
    """Return a tool as Anthropic has it."""
    function = tool["function"]
    return {"name": function["name"], "input_schema": function.get("parameters", EMPTY)}


EMPTY: Any = {"type": "object", "properties": {}}
TOOLS: Any = [as_anthropic(tool) for tool in (WEATHER, NOW)]
NAMED: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
ANY: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture
def claude(tool_server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tool_server.url, api_key="any", max_retries=0) as client:
        yield client


def asked(choice: Any, messages: Any = QUESTION) -> Any:
    fields: Any = {"model": MODEL, "messages": messages, "max_tokens": 150, "tools": TOOLS}
    fields |= {"tool_choice": choice, "thinking": {"type": "disabled"}}
    return fields | {"extra_body": {"temperature": 0}}


@pytest.mark.parametrize("choice", [NAMED, ANY], ids=["tool", "any"])
def test_anthropics_client_goes_on_with_a_result(
    claude: anthropic.Anthropic, client: openai.OpenAI, choice: Any
) -> None:
    answer = claude.messages.create(**asked(choice))
    (use,) = (block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use"
    if use.name == "get_weather":
        check_weather(json.dumps(use.input))
    else:
        assert (choice, use.name, use.input) == (ANY, "now", {})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "7 degrees, rain"}
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    after = claude.messages.create(**asked({"type": "none"}, messages))
    assert all(block.type == "text" for block in after.content)
    fields = {"thinking": {"type": "disabled"}, "tools": TOOLS}
    counted = claude.messages.count_tokens(model=MODEL, messages=messages, **fields)
    arguments = json.dumps(use.input)
    assert counted.input_tokens == num_prompt_tokens(client, use.id, use.name, arguments)


def test_anthropics_client_streams_a_call(claude: anthropic.Anthropic) -> None:
    (whole,) = claude.messages.create(**asked(NAMED)).content
    with claude.messages.stream(**asked(NAMED)) as events:
        parts = [event.partial_json for event in events if event.type == "input_json"]
        final = events.get_final_message()
    (streamed,) = final.content
    assert whole.type == streamed.type == "tool_use"
    assert (streamed.name, streamed.input) == (whole.name, whole.input)
    assert (final.stop_reason, json.loads("".join(parts))) == ("tool_use", whole.input)
    assert len(parts) > 3, "arguments come as they are written"


def num_prompt_tokens(client: openai.OpenAI, id: str, name: str, arguments: str) -> int:
    """Return how many tokens the same conversation has as a chat."""
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": "7 degrees, rain"},
    ]
    tools = [WEATHER, {"type": "function", "function": NOW["function"] | {"parameters": EMPTY}}]
    count: int = ask(client, messages=messages, tools=tools, max_tokens=1).usage.prompt_tokens
    return count


# OpenAI's responses

FUNCTIONS: Any = [
    {"type": "function", "name": tool["name"], "parameters": tool["input_schema"]} for tool in TOOLS
]


def wanted(choice: Any, input: Any = QUESTION) -> Any:
    fields: Any = {"model": MODEL, "input": input, "max_output_tokens": 150, "tools": FUNCTIONS}
    fields |= {"reasoning": {"effort": "none"}}
    return fields | {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 0}


@pytest.mark.parametrize("choice", [{"type": "function", "name": "get_weather"}, "required"])
def test_a_response_goes_on_with_a_result(client: openai.OpenAI, choice: Any) -> None:
    response = client.responses.create(**wanted(choice))
    (call,) = (item for item in response.output if item.type == "function_call")
    assert (response.status, call.status) == ("completed", "completed")
    if call.name == "get_weather":
        check_weather(call.arguments)
    else:
        assert (choice, call.name, call.arguments) == ("required", "now", "{}")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees, rain"}
    after = client.responses.create(**wanted("auto", [*QUESTION, *response.output, result]))
    assert after.usage is not None
    told = num_prompt_tokens(client, call.call_id, call.name, call.arguments)
    assert after.usage.input_tokens == told


def test_a_response_streams_a_call(client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "get_weather"}
    (whole,) = client.responses.create(**wanted(choice)).output
    parts = []
    with client.responses.stream(**wanted(choice)) as events:
        for event in events:
            if event.type == "response.function_call_arguments.delta":
                parts.append(event.delta)
        (streamed,) = events.get_final_response().output
    assert whole.type == streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (whole.name, whole.arguments)
    assert "".join(parts) == whole.arguments
    assert len(parts) > 3, "arguments come as they are written"


DATE: Any = {"type": "grammar", "definition": "20[0-9]{2}-[01][0-9]", "syntax": "regex"}


def test_a_custom_tool_is_called_with_a_text(client: openai.OpenAI) -> None:
    grammar = {name: DATE[name] for name in ("definition", "syntax")}
    format = {"type": "grammar", "grammar": grammar}
    tool: Any = {"type": "custom", "custom": {"name": "set_month", "format": format}}
    choice = {"type": "custom", "custom": {"name": "set_month"}}
    (call,) = ask(client, tools=[tool], tool_choice=choice).choices[0].message.tool_calls
    assert (call.type, call.custom.name) == ("custom", "set_month")
    assert re.fullmatch(DATE["definition"], call.custom.input)


def test_a_response_streams_a_custom_call(client: openai.OpenAI) -> None:
    tools = [{"type": "custom", "name": "set_month", "format": DATE}]
    body = wanted({"type": "custom", "name": "set_month"}) | {"tools": tools}
    (whole,) = client.responses.create(**body).output
    assert whole.type == "custom_tool_call"
    assert re.fullmatch(DATE["definition"], whole.input)
    events = list(client.responses.create(**body, stream=True))
    (done,) = (e for e in events if e.type == "response.custom_tool_call_input.done")
    assert done.input == whole.input
    output = {"type": "custom_tool_call_output", "call_id": whole.call_id, "output": "done"}
    after = client.responses.create(**wanted("auto", [*QUESTION, whole, output]))
    assert after.status in ("completed", "incomplete")


def test_only_allowed_tools_are_called(client: openai.OpenAI) -> None:
    for tool, name in ((WEATHER, "get_weather"), (NOW, "now")):
        named = {"type": "function", "function": {"name": name}}
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
        calls = ask(client, tool_choice=choice).choices[0].message.tool_calls
        assert {call.function.name for call in calls} == {tool["function"]["name"]}


def test_a_function_is_called_by_its_old_name(client: openai.OpenAI) -> None:
    functions: Any = [WEATHER["function"]]
    old: Any = {"functions": functions, "function_call": {"name": "get_weather"}}
    body: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 150, "seed": 1} | old
    choice = client.chat.completions.create(**body, extra_body=AT_ONCE).choices[0]
    called = choice.message.function_call
    assert (choice.finish_reason, choice.message.tool_calls) == ("function_call", None)
    assert called is not None
    check_weather(called.arguments)
    chunks = client.chat.completions.create(**body, stream=True, extra_body=AT_ONCE)
    deltas = [chunk.choices[0].delta.function_call for chunk in chunks]
    assert "".join((delta.arguments or "") for delta in deltas if delta) == called.arguments


def test_the_examples_of_the_documentation_work(tool_server: RunningServer) -> None:
    told = []
    for body in map(json.loads, blocks("docs/tools.md", "json")):
        with Client(tool_server.url) as client:
            told.append(client.chat(**body, max_tokens=20).usage.prompt_tokens)
    assert len(told) == 3
