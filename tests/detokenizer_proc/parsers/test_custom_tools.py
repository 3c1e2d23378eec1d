"""Calls of custom tools tell their input as text, those of functions as once; whole or streamed."""

import json
from typing import Any

import msgspec
import pytest
from byte_responses import END, RESPONSES_FORM, ByteVocabulary, make_plan
from openai.types.responses import ResponseCustomToolCall

from headrace.detokenizer_proc.parsers.custom_tools import input_of
from headrace.detokenizer_proc.text_response import TextResponse
from headrace.ipc.messages import Api, FinishReason, Parsing, StepOutput
from headrace.model.output_formats import ToolFormat
from headrace.response_bodies.openai_completions import ChatCompletionStreamResponse
from headrace.response_bodies.openai_responses import ResponseEvent

STOP = FinishReason.STOP
CODE = 'print("é")\n'
CALL = f'<tool_call>{{"name": "run", "arguments": {json.dumps({"input": CODE})}}}</tool_call>'
OTHER = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
CUSTOM = Parsing(tools=ToolFormat.HERMES, custom_tools=["run"])
TOKENS = [*(CALL + "\n" + OTHER).encode(), END]


def sent(tokens: list[int], parsing: Parsing, **fields: Any) -> bytes:
    """Return what a client is sent of a response whose tokens come one by one."""
    plan = make_plan(**({"api": Api.CHAT, "parsing": parsing} | fields))
    response = TextResponse(plan, ByteVocabulary())
    data = response.open(plan, 0, StepOutput.of({}, [], [], []))
    for place, token in enumerate(tokens, 1):
        data += response.feed(0, [token], STOP if place == len(tokens) else None, b"")[0]
    return data if response.streams else b"".join(response.whole())


def chunks(data: bytes) -> list[Any]:
    events = data.decode().split("\n\n")
    return [json.loads(e.removeprefix("data: ")) for e in events if e and "[DONE]" not in e]


def test_a_custom_call_of_a_chat_has_its_input() -> None:
    (choice,) = json.loads(sent(TOKENS, CUSTOM))["choices"]
    custom, function = choice["message"]["tool_calls"]
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "run", "input": CODE})
    assert function["function"] == {"name": "now", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"


def test_a_custom_call_streams_its_input() -> None:
    found = chunks(sent(TOKENS, CUSTOM, stream=True))
    deltas = [c["choices"][0]["delta"] for c in found if "tool_calls" in c["choices"][0]["delta"]]
    calls = [delta["tool_calls"][0] for delta in deltas]
    for chunk in found:
        msgspec.convert(chunk, ChatCompletionStreamResponse)
    assert calls[0] == calls[0] | {"index": 0, "type": "custom"}
    assert calls[0]["custom"] == {"name": "run", "input": ""}
    assert calls[1] == {"index": 0, "custom": {"input": CODE}}
    assert (calls[2]["index"], calls[2]["function"]["name"]) == (1, "now")


@pytest.mark.parametrize("stream", [True, False])
def test_a_custom_call_is_an_item_of_a_response(stream: bool) -> None:
    form = RESPONSES_FORM
    data = sent(TOKENS, CUSTOM, api=Api.RESPONSES, stream=stream, form=form)
    if stream:
        events = [
            json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")
        ]
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        kinds = [e["type"] for e in events]
        for one in events[1:-1]:
            if "response" not in one:
                msgspec.convert(one, ResponseEvent)
        start = kinds.index("response.output_item.added")
        assert kinds[start + 1 : start + 4] == [
            "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done",
            "response.output_item.done",
        ]
        assert (events[start + 1]["delta"], events[start + 2]["input"]) == (CODE, CODE)
        output = events[-1]["response"]["output"]
    else:
        output = json.loads(data)["output"]
    call = ResponseCustomToolCall.model_validate(output[0])
    assert (call.type, call.name, call.input) == ("custom_tool_call", "run", CODE)
    assert output[1]["type"] == "function_call"


def test_an_input_that_is_none_is_reported_as_it_is() -> None:
    assert input_of('{"input": "x"}') == "x"
    assert [input_of(text) for text in ('{"a": "x"}', '{"input": 1}', '{"inp')] == [
        '{"a": "x"}',
        '{"input": 1}',
        '{"inp',
    ]


def test_a_call_is_a_function_call_if_functions_were_sent() -> None:
    parsing = Parsing(tools=ToolFormat.HERMES, has_one_call=True)
    tokens = [*OTHER.encode(), END]
    (choice,) = json.loads(sent(tokens, parsing, function_call=True))["choices"]
    message = choice["message"]
    assert message["function_call"] == {"name": "now", "arguments": '{"a": 1}'}
    assert ("tool_calls" in message, message["content"]) == (False, None)
    assert choice["finish_reason"] == "function_call"
    found = chunks(sent(tokens, parsing, function_call=True, stream=True))
    calls = [c["choices"][0]["delta"].get("function_call") for c in found]
    told = [call for call in calls if call]
    assert told[0] == {"name": "now", "arguments": ""}
    assert "".join(call["arguments"] for call in told) == '{"a": 1}'
    assert found[-1]["choices"][0]["finish_reason"] == "function_call"
