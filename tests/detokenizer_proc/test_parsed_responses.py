"""Calls and thoughts reach clients in OpenAI's form, streamed or whole, from tokens on."""

import json
from array import array
from typing import Any

import msgspec
import pytest
from byte_responses import RESPONSES_FORM, make_plan, take

from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.text import TableVocabulary
from headrace.ipc.messages import Api, FinishReason, Parsing, StepOutput, request_id
from headrace.metrics.tool_calls import READINGS
from headrace.model.output_formats import ThoughtFormat, ToolFormat
from headrace.model.token_table import TokenTable
from headrace.response_bodies.openai_completions import ChatCompletionStreamResponse

# Ids are bytes, but for the last ones, special tokens.
SPECIAL = ["<|end|>", "[TOOL_CALLS]", "<pad>"]
END, TOOL_CALLS, PAD = 256, 257, 258
TABLE = TokenTable(
    [*(bytes([byte]) for byte in range(256)), *(token.encode() for token in SPECIAL)],
    frozenset({END, TOOL_CALLS, PAD}),
)
MISTRAL = Parsing(tools=ToolFormat.MISTRAL)
THINKING = Parsing(tools=ToolFormat.HERMES, thoughts=ThoughtFormat.QWEN3)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
ID = request_id(0, 1)
CALLED = '<think>Hm</think>So:\n<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'


def ids(text: str) -> list[int]:
    return list(text.encode())


def sent(
    tokens: list[int],
    parsing: Parsing,
    finished: FinishReason,
    responses: InflightResponses | None = None,
    **fields: Any,
) -> bytes:
    """Return what a client is sent of a response whose tokens come one by one."""
    responses = InflightResponses(TableVocabulary(TABLE), 2) if responses is None else responses
    plan = make_plan(**({"api": Api.CHAT, "parsing": parsing} | fields))
    data = b""
    for place, token in enumerate(tokens):
        started = {} if place else {ID: msgspec.msgpack.encode(plan)}
        end = finished if place == len(tokens) - 1 else None
        output = StepOutput.of(started, [ID], [1], [end])
        outgoing, stops = take(responses, output, array("I", [token]).tobytes())
        assert stops == []
        data += b"".join(frames.data() for frames in outgoing.values())
    assert len(responses) == 0
    return data


def whole(*args: Any, **fields: Any) -> Any:
    (choice,) = json.loads(sent(*args, **fields))["choices"]
    return choice


def streamed(*args: Any, **fields: Any) -> tuple[Any, str]:
    """Return the message that a stream's deltas add up to, and why it ended."""
    data = sent(*args, stream=True, **fields).decode()
    *events, done, _ = data.split("\n\n")
    assert done == "data: [DONE]"
    message: dict[str, Any] = {}
    end = None
    for event in events:
        body = json.loads(event.removeprefix("data: "))
        msgspec.convert(body, ChatCompletionStreamResponse)
        (choice,) = body["choices"]
        assert end is None
        end = choice["finish_reason"]
        delta = choice["delta"]
        for name in ("content", "reasoning_content", "reasoning"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call.pop("index") == len(calls)
                calls.append(call)
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert end is not None
    return message, end


def call_of(message: Any) -> tuple[str, str]:
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    return call["function"]["name"], call["function"]["arguments"]


def test_a_call_and_thoughts_in_a_whole_answer() -> None:
    choice = whole([*ids(CALLED), END], THINKING, STOP)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == "Hm"
    assert choice["message"]["content"] == "So:\n"
    assert call_of(choice["message"]) == ("f", '{"a": "é"}')


def test_a_call_and_thoughts_in_a_stream() -> None:
    message, end = streamed([*ids(CALLED), END], THINKING, STOP)
    assert end == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("Hm", "So:\n")
    assert message["reasoning"] == "Hm"
    assert call_of(message) == ("f", '{"a": "é"}')


def test_an_answer_without_calls_is_what_it_was() -> None:
    tokens = [*ids("Just words.\n"), END]
    assert whole(tokens, THINKING, STOP)["message"] == {
        "role": "assistant",
        "content": "Just words.\n",
        "refusal": None,
    }
    assert streamed(tokens, THINKING, STOP) == ({"content": "Just words.\n"}, "stop")


def test_a_call_that_is_cut_off_says_so() -> None:
    message, end = streamed(ids(CALLED[:-20]), THINKING, LENGTH)
    assert end == "length"
    assert call_of(message) == ("f", '{"a')


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_reach_the_parser_and_no_client(skip: bool) -> None:
    tokens = [*ids("a"), PAD, TOOL_CALLS, *ids('[{"name": "f", "arguments": {}}]'), END]
    choice = whole(tokens, MISTRAL, STOP, skip_special_tokens=skip)
    assert choice["message"]["content"] == ("a" if skip else "a<pad>")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}


def test_a_call_is_the_same_where_token_ids_are_reported() -> None:
    tokens = [*ids(CALLED), END]
    message, end = streamed(tokens, THINKING, STOP, return_token_ids=True)
    assert (call_of(message), end) == (("f", '{"a": "é"}'), "tool_calls")


def test_tool_call_readings_count_once_per_body_or_event() -> None:
    responses = InflightResponses(TableVocabulary(TABLE), 2)

    def counted() -> dict[tuple[str, ...], int]:
        return {READINGS[place]: times for place, times in responses.readings().items()}

    called, words = [*ids(CALLED), END], [*ids("Words"), END]
    sent(called, THINKING, STOP, responses)
    sent(words, THINKING, STOP, responses, api=Api.RESPONSES, form=RESPONSES_FORM)
    sent(words, THOUGHT, STOP, responses)
    assert counted() == {
        ("non_streaming", "tool_call", "chat_completions"): 1,
        ("non_streaming", "no_tool_call", "responses"): 1,
    }
    events = sent(called, THINKING, STOP, responses, stream=True).count(b'"delta":')
    told = counted()
    assert told.keys() == {
        ("streaming", "no_tool_call", "chat_completions"),
        ("streaming", "tool_call", "chat_completions"),
    }
    assert sum(told.values()) == events - 2, "all but those with the role and the end"
    assert counted() == {}


THOUGHT = Parsing(thoughts=ThoughtFormat.QWEN3)
OPEN = Parsing(thoughts=ThoughtFormat.DEEPSEEK_R1, begins_inside=True)


@pytest.mark.parametrize(
    ("tokens", "parsing", "finished", "count"),
    [
        ([*ids("\n<think>\nHm é</think>\n\nSo"), END], THOUGHT, STOP, 5),
        (ids("<think>Hm, <thi"), THOUGHT, LENGTH, 8),
        ([*ids("Hm, </thin</think>So"), END], OPEN, STOP, 10),
        (ids("  Hm"), OPEN, LENGTH, 2),
        ([*ids("<think>H"), PAD, *ids("m</think>"), END], THOUGHT, STOP, 3),
        ([*ids("<think></think>So"), END], THOUGHT, STOP, 0),
        ([*ids("<thin air"), END], THOUGHT, STOP, 0),
    ],
)
@pytest.mark.parametrize("hides", [False, True])
def test_the_tokens_of_thoughts_are_counted(
    tokens: list[int], parsing: Parsing, finished: FinishReason, count: int, hides: bool
) -> None:
    parsing = msgspec.structs.replace(parsing, hides_thoughts=hides)
    body = json.loads(sent(tokens, parsing, finished))
    details = {"reasoning_tokens": count}
    assert body["usage"]["completion_tokens_details"] == details
    streamed = sent(tokens, parsing, finished, stream=True, include_usage=True)
    assert json.loads(streamed.split(b"data: ")[-2])["usage"] == body["usage"]
    form = RESPONSES_FORM
    response = json.loads(sent(tokens, parsing, finished, api=Api.RESPONSES, form=form))
    assert response["usage"]["output_tokens_details"] == details


def test_a_stop_string_ends_the_thoughts_that_are_counted() -> None:
    responses = InflightResponses(TableVocabulary(TABLE), 2)
    plan = make_plan(api=Api.CHAT, parsing=THOUGHT, stop=["nd"])
    started = {ID: msgspec.msgpack.encode(plan)}
    tokens = ids("<think>And so</think>")
    output = StepOutput.of(started, [ID], [len(tokens)], [None])
    outgoing, _ = take(responses, output, array("I", tokens).tobytes())
    usage = json.loads(outgoing[0].data())["usage"]
    assert usage["completion_tokens"] == len("<think>And")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 1}


def test_no_thoughts_are_counted_where_none_are_looked_for() -> None:
    body = json.loads(sent([*ids(CALLED), END], Parsing(tools=ToolFormat.HERMES), STOP))
    assert "completion_tokens_details" not in body["usage"]
