"""Response bodies are those of OpenAI's API, field by field."""

import json
from typing import Any

import msgspec
import pytest

from headrace.detokenizer_proc.parsers.pieces import Arguments, Content, ToolCallStart
from headrace.detokenizer_proc.renderers.openai import OpenAIRenderer, finish_name, usage_body
from headrace.detokenizer_proc.renderers.renderer import Choice, TokenUsage
from headrace.ipc.messages import Api, FinishReason, ResponsePlan

IDENTITY = {"id": "x-1", "created": 5, "model": "tiny", "system_fingerprint": None}


USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def make_renderer(chat: bool, stream: bool = True, include_usage: bool = False) -> OpenAIRenderer:
    return OpenAIRenderer(
        ResponsePlan(
            response_id="x-1",
            model="tiny",
            created=5,
            api=Api.CHAT if chat else Api.COMPLETION,
            stream=stream,
            include_usage=include_usage,
            num_sequences=1,
            num_prompt_tokens=3,
            index=0,
            stop=[],
            include_stop=False,
            skip_special_tokens=True,
        )
    )


def events(data: bytes) -> list[Any]:
    """Return the events in `data`, decoded, "[DONE]" as it is."""
    assert data.endswith(b"\n\n") or not data
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        assert event.startswith("data: ")
        assert "\n" not in event
        text = event.removeprefix("data: ")
        found.append(text if text == "[DONE]" else json.loads(text))
    return found


def chat_chunk(delta: dict[str, str], finish: str | None, index: int = 0) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return IDENTITY | {"object": "chat.completion.chunk", "choices": [choice]}


def text_chunk(text: str, finish: str | None, index: int = 0) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
    return IDENTITY | {"object": "text_completion", "choices": [choice]}


def test_a_chat_opens_with_the_role() -> None:
    expected = chat_chunk({"role": "assistant", "content": ""}, None, index=2)
    assert events(make_renderer(chat=True).opening(2)) == [expected]


def test_a_completion_opens_with_nothing() -> None:
    assert make_renderer(chat=False).opening(0) == b""


def test_new_text_of_a_chat_is_a_delta() -> None:
    data = make_renderer(chat=True).delta(1, [Content('é"\n🦊')], None)
    assert events(data) == [chat_chunk({"content": 'é"\n🦊'}, None, index=1)]


def test_the_end_of_a_chat_is_an_empty_delta_after_the_text() -> None:
    data = make_renderer(chat=True).delta(0, [Content("end")], FinishReason.STOP)
    assert events(data) == [chat_chunk({"content": "end"}, None), chat_chunk({}, "stop")]


def test_an_end_without_text_is_one_event() -> None:
    data = make_renderer(chat=True).delta(0, [], FinishReason.LENGTH)
    assert events(data) == [chat_chunk({}, "length")]


def test_text_and_end_of_a_completion_are_one_event() -> None:
    data = make_renderer(chat=False).delta(1, [Content("end")], FinishReason.LENGTH)
    assert events(data) == [text_chunk("end", "length", index=1)]


def test_a_stream_closes_with_done() -> None:
    assert make_renderer(chat=True).closing(TokenUsage(3, 4, 2)) == b"data: [DONE]\n\n"


def test_usage_comes_last_with_no_choices_and_is_null_before() -> None:
    renderer = make_renderer(chat=True, include_usage=True)
    (chunk,) = events(renderer.delta(0, [Content("x")], None))
    assert chunk["usage"] is None
    last, done = events(renderer.closing(TokenUsage(3, 4, 2)))
    assert last["choices"] == []
    assert last["usage"] == USAGE
    assert done == "[DONE]"


def test_usage_is_absent_where_it_is_not_wanted() -> None:
    (chunk,) = events(make_renderer(chat=True).delta(0, [Content("x")], None))
    assert "usage" not in chunk


def test_a_whole_chat() -> None:
    renderer = make_renderer(chat=True, stream=False)
    answers = [Choice("a", FinishReason.STOP), Choice("b", FinishReason.LENGTH)]
    body = json.loads(b"".join(renderer.whole(answers, TokenUsage(3, 4, 2))))
    assert body == IDENTITY | {
        "object": "chat.completion",
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, text, reason in [(0, "a", "stop"), (1, "b", "length")]
        ],
        "usage": USAGE,
    }


def test_a_whole_completion() -> None:
    renderer = make_renderer(chat=False, stream=False)
    body = json.loads(
        b"".join(renderer.whole([Choice("a", FinishReason.STOP)], TokenUsage(3, 1, 0)))
    )
    usage = msgspec.to_builtins(usage_body(TokenUsage(3, 1, 0)))
    assert body == text_chunk("a", "stop") | {"usage": usage}


@pytest.mark.parametrize("chat", [True, False])
def test_content_type_distinguishes_streams(chat: bool) -> None:
    assert make_renderer(chat).content_type == "text/event-stream; charset=utf-8"
    assert make_renderer(chat, stream=False).content_type == "application/json"


def test_finish_reasons_are_openais_words() -> None:
    assert finish_name(FinishReason.STOP) == "stop"
    assert finish_name(FinishReason.LENGTH) == "length"
    assert finish_name(None) is None


def test_fields_of_tool_call_chunks_keep_their_order() -> None:
    renderer = make_renderer(chat=True)
    pieces = [ToolCallStart(0, "c", "f", is_custom=False), Arguments(0, "{}", is_custom=False)]
    head = b'data: {"id":"x-1","object":"chat.completion.chunk","created":5,"model":"tiny",'
    head += b'"system_fingerprint":null,"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,'
    end = b'}]},"logprobs":null,"finish_reason":null}]}\n\n'
    begin = b'"id":"c","type":"function","function":{"name":"f","arguments":""}'
    assert renderer.delta(0, pieces, None) == (
        head + begin + end + head + b'"function":{"arguments":"{}"}' + end
    )


def test_fields_are_in_the_order_of_openai() -> None:
    head = ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    for chat in (True, False):
        (event,) = events(make_renderer(chat, include_usage=True).delta(0, [Content("a")], None))
        whole = make_renderer(chat, stream=False).whole(
            [Choice("a", FinishReason.STOP)], TokenUsage(3, 1, 0)
        )
        assert list(event) == list(json.loads(b"".join(whole))) == head
