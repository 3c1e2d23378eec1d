"""A message is Anthropic's, whole and streamed, as its own client reads them."""

import functools
import json
from typing import Any

import msgspec
import pytest
from byte_responses import END, NOTHING, ByteVocabulary, make_plan, take
from named_events import PIECES, named_events
from pydantic import TypeAdapter

from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.parsers.pieces import Call, Content, Thought, gathered
from headrace.detokenizer_proc.renderers.anthropic import MessagesRenderer
from headrace.detokenizer_proc.renderers.renderer import Choice, TokenUsage
from headrace.detokenizer_proc.text_response import TextResponse
from headrace.errors import InternalError
from headrace.ipc.messages import Api, FinishReason, ResponsePlan, StepOutput, request_id
from headrace.response_bodies.anthropic_messages import MessageEvent, MessagesResponse

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
USAGE = TokenUsage(num_prompt=9, num_completion=4, num_cached=2, num_thought=3)


@functools.cache
def event_type() -> TypeAdapter[Any]:
    """Return the type of Anthropic's events. Its import takes seconds."""
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


def make_message_plan(**fields: Any) -> ResponsePlan:
    return make_plan(api=Api.MESSAGES, **({"continuous_usage": True} | fields))


def events(data: bytes) -> list[Any]:
    """Return the events in `data`, checked by the client's types, and by ours."""
    found = named_events(data, event_type())
    msgspec.convert(found, list[MessageEvent])
    return found


def content_of(found: list[Any]) -> list[Any]:
    """Put the blocks of a stream together."""
    blocks: list[Any] = []
    for event in found:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
            case "content_block_delta":
                (name, text) = next(item for item in event["delta"].items() if item[0] != "type")
                blocks[-1][name] = blocks[-1].get(name, "") + text
    for block in blocks:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    return blocks


def test_a_stream_says_what_the_whole_message_says() -> None:
    renderer = MessagesRenderer(make_message_plan(stream=True))
    data = renderer.opening(0, USAGE._replace(num_completion=0, num_thought=0))
    for piece in PIECES:
        data += renderer.delta(0, [piece], None)
    data += renderer.delta(0, [], STOP, stopped_by=END) + renderer.closing(USAGE)
    found = events(data)
    text, thought, calls = gathered(PIECES)
    answer = Choice(text, STOP, thought=thought, calls=calls, stopped_by=END)
    body = b"".join(MessagesRenderer(make_message_plan()).whole([answer], USAGE))
    whole = json.loads(body)
    from anthropic.types import Message

    Message.model_validate(whole)
    msgspec.json.decode(body, type=MessagesResponse)
    assert content_of(found) == whole["content"]
    assert whole["content"] == [
        {"type": "thinking", "thinking": "The sea?", "signature": whole["id"]},
        {"type": "text", "text": "I'll look."},
        {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "sea"}},
        {"type": "tool_use", "id": "call_2", "name": "wait", "input": {}},
    ]
    begin, end = found[0]["message"], found[-2]
    assert begin | end["delta"] | {"content": whole["content"], "usage": end["usage"]} == whole
    assert whole["stop_reason"] == "tool_use"
    assert begin["usage"]["output_tokens"] == 0
    assert whole["usage"] == {
        "input_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 3},
    }


def test_thoughts_are_signed_at_their_end() -> None:
    renderer = MessagesRenderer(make_message_plan(stream=True))
    found = events(renderer.delta(0, [Thought("Hm"), Content("So")], STOP))
    kinds = [event.get("delta", event)["type"] for event in found]
    begin = ["content_block_start", "thinking_delta", "signature_delta", "content_block_stop"]
    assert kinds == [*begin, "content_block_start", "text_delta", "content_block_stop"]


def test_every_block_is_closed_before_the_next_one_begins() -> None:
    renderer = MessagesRenderer(make_message_plan(stream=True))
    found = events(renderer.delta(0, PIECES, LENGTH))
    open_blocks: list[int] = []
    for event in found:
        if event["type"] == "content_block_start":
            assert not open_blocks
            open_blocks.append(event["index"])
        elif event["type"] == "content_block_stop":
            assert open_blocks.pop() == event["index"]
    assert not open_blocks


@pytest.mark.parametrize(
    ("tokens", "finished", "text", "reason", "sequence"),
    [
        (b"ab", LENGTH, "ab", "max_tokens", None),
        (bytes([*b"ab", END]), STOP, "ab", "end_turn", None),
        (b"a##b", None, "a", "stop_sequence", "##"),
        (bytes([*b"a#", END]), STOP, "a#", "end_turn", None),
    ],
)
def test_why_a_message_ends(
    tokens: bytes, finished: FinishReason | None, text: str, reason: str, sequence: str | None
) -> None:
    for stream in (True, False):
        plan = make_message_plan(stream=stream, stop=["##", "@"])
        response = TextResponse(plan, ByteVocabulary())
        data = response.open(plan, 0, NOTHING)
        for position, token in enumerate(tokens):
            is_last = position == len(tokens) - 1
            data += response.feed(0, [token], finished if is_last else None, b"")[0]
        assert response.is_complete
        if stream:
            found = events(data)
            content, end = content_of(found), found[-2]["delta"]
        else:
            end = json.loads(b"".join(response.whole()))
            content = end["content"]
        assert content == [{"type": "text", "text": text}]
        assert (end["stop_reason"], end["stop_sequence"]) == (reason, sequence)


def test_an_answer_without_a_word_has_no_blocks() -> None:
    whole = json.loads(
        b"".join(MessagesRenderer(make_message_plan()).whole([Choice("", STOP)], USAGE))
    )
    assert whole["content"] == []
    assert events(MessagesRenderer(make_message_plan(stream=True)).delta(0, [], STOP)) == []


def test_arguments_that_were_cut_off_are_not_reported() -> None:
    answer = Choice("", LENGTH, calls=[Call("call_1", "look", '{"at": "se')])
    whole = json.loads(b"".join(MessagesRenderer(make_message_plan()).whole([answer], USAGE)))
    assert (whole["content"][0]["input"], whole["stop_reason"]) == ({}, "max_tokens")


def test_a_stream_that_fails_ends_in_anthropics_words() -> None:
    data = MessagesRenderer(make_message_plan(stream=True)).failure(InternalError())
    name, body = data.decode().split("\n")[:2]
    error = json.loads(body.removeprefix("data: "))
    assert (name, error["type"]) == ("event: error", "error")
    assert error["error"]["type"] == "api_error"


def test_a_full_queue_is_reported_in_the_words_of_the_api() -> None:
    responses = InflightResponses(ByteVocabulary(), 1)
    kinds = {Api.MESSAGES: {"type": "error"}, Api.CHAT: {}}
    for number, (api, extra) in enumerate(kinds.items()):
        id = request_id(0, number)
        plan = msgspec.msgpack.encode(make_plan(api=api))
        output = StepOutput.of({id: plan}, [id], [0], [FinishReason.REFUSED])
        (frames,) = take(responses, output, b"")[0].values()
        body = json.loads(frames.data())
        assert frames.message().heads[id].status == 429
        assert body["error"]["type"] == "rate_limit_error"
        assert body.items() >= extra.items()
        assert ("type" in body) == bool(extra)


def test_fields_of_a_message_keep_their_order() -> None:
    answer = Choice("Hi", STOP)
    body = b"".join(MessagesRenderer(make_message_plan()).whole([answer], USAGE))
    assert body == (
        b'{"id":"x-1","type":"message","role":"assistant","model":"tiny",'
        b'"content":[{"type":"text","text":"Hi"}],"stop_reason":"end_turn","stop_sequence":null,'
        b'"usage":{"input_tokens":7,"cache_creation_input_tokens":0,"cache_read_input_tokens":2,'
        b'"output_tokens":4,"output_tokens_details":{"thinking_tokens":3}}}'
    )
