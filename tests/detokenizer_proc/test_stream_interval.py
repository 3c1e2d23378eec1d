"""Stream intervals: an event every so many tokens, in each format, from the core or from Python."""

import json
from array import array
from typing import Any

import msgspec
import pytest
from byte_responses import RESPONSES_FORM, TABLE, ByteVocabulary, make_plan, take

from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.parsers.pieces import (
    Arguments,
    Content,
    Piece,
    Thought,
    ToolCallStart,
    joined,
)
from headrace.detokenizer_proc.text import TableVocabulary, Vocabulary
from headrace.ipc.messages import (
    Api,
    FinishReason,
    GenerateForm,
    Parsing,
    StepOutput,
    request_id,
)
from headrace.ipc.token_logprobs import TokenLogprob
from headrace.model.output_formats import ThoughtFormat, ToolFormat

ID = request_id(0, 1)
LENGTH = FinishReason.LENGTH
TEXT = "abcdefgh"
EVENTS = [(1, [*TEXT]), (3, ["a", "bcd", "efg", "h"]), (100, ["a", "bcdefgh"])]
GENERATE = GenerateForm(False, 0.0, [], 1, True, [0], [None])


def stream(interval: int, vocabulary: Vocabulary, text: str = TEXT, **fields: Any) -> str:
    """Return what a client is sent of a response whose bytes come one by one, as tokens."""
    responses = InflightResponses(vocabulary, 2, interval)
    plan = msgspec.msgpack.encode(make_plan(stream=True, **fields))
    data = b""
    for place, byte in enumerate(text.encode()):
        output = StepOutput.of(
            {} if place else {ID: plan},
            [ID],
            [1],
            [LENGTH if place == len(text) - 1 else None],
            logprobs={ID: TokenLogprob(-1.0, 1, []).pack()} if "logprobs" in fields else {},
        )
        outgoing, _ = take(responses, output, array("I", [byte]).tobytes())
        data += b"".join(frames.data() for frames in outgoing.values())
    assert len(responses) == 0
    return data.decode()


def events(data: str) -> list[Any]:
    return [json.loads(line[6:]) for line in data.split("\n") if line.startswith("data: {")]


@pytest.mark.parametrize(("interval", "expected"), EVENTS)
def test_log_probabilities_and_token_ids_come_with_their_text(
    interval: int, expected: list[str]
) -> None:
    told = events(stream(interval, TableVocabulary(TABLE), logprobs=0, return_token_ids=True))[1:]
    choices = [event["choices"][0] for event in told]
    assert [choice["text"] for choice in choices] == expected
    assert [choice["token_ids"] for choice in choices] == [list(t.encode()) for t in expected]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [[*t] for t in expected]


@pytest.mark.parametrize(("interval", "expected"), EVENTS)
def test_an_event_of_generate_has_all_so_far(interval: int, expected: list[str]) -> None:
    fields: dict[str, Any] = {"api": Api.GENERATE, "form": GENERATE, "return_token_ids": True}
    told = events(
        stream(interval, ByteVocabulary(), continuous_usage=True, logprobs=0, **fields),
    )
    so_far = ["".join(expected[: n + 1]) for n in range(len(expected))]
    assert [event["text"] for event in told] == so_far
    metas = [event["meta_info"] for event in told]
    assert [meta["completion_tokens"] for meta in metas] == [len(text) for text in so_far]
    assert [len(m["output_token_logprobs"]) for m in metas] == [len(text) for text in so_far]


@pytest.mark.parametrize(("interval", "expected"), EVENTS)
def test_responses_and_messages_have_as_many_deltas(interval: int, expected: list[str]) -> None:
    told = events(stream(interval, ByteVocabulary(), api=Api.RESPONSES, form=RESPONSES_FORM))
    deltas = [event["delta"] for event in told if event["type"] == "response.output_text.delta"]
    assert deltas == expected
    told = events(stream(interval, ByteVocabulary(), api=Api.MESSAGES, continuous_usage=True))
    found = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert [delta["text"] for delta in found] == expected


def test_calls_and_thoughts_are_what_they_are_without_it() -> None:
    parsing = Parsing(tools=ToolFormat.HERMES, thoughts=ThoughtFormat.QWEN3)
    text = '<think>Hm, so</think>Well.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    found, counts = [], []
    for interval in (1, 8, 1000):
        data = stream(interval, TableVocabulary(TABLE), text, api=Api.CHAT, parsing=parsing)
        message = {"reasoning_content": "", "content": "", "arguments": "", "names": []}
        chunks = events(data)
        for chunk in chunks:
            delta = chunk["choices"][0]["delta"]
            for name in ("reasoning_content", "content"):
                message[name] += delta.get(name, "")
            for call in delta.get("tool_calls", []):
                message["arguments"] += call["function"]["arguments"]
                message["names"] += [call["function"]["name"]] if "id" in call else []
        found.append(message)
        counts.append(len(chunks))
    assert found[0] == found[1] == found[2]
    assert (found[0]["names"], found[0]["arguments"]) == (["f"], '{"a": 1}')
    assert (found[0]["reasoning_content"], found[0]["content"]) == ("Hm, so", "Well.\n")
    assert counts[0] > counts[1] > counts[2]


def test_only_pieces_that_go_on_are_joined() -> None:
    call: list[Piece] = [ToolCallStart(0, "c", "f"), Arguments(0, "{"), Arguments(0, "}")]
    other: list[Piece] = [Arguments(1, "["), Arguments(1, "]")]
    words: list[Piece] = [Content("a"), Content("b"), Thought("c"), Thought("d"), Content("e")]
    assert joined([*words, *call, *other]) == [
        Content("ab"),
        Thought("cd"),
        Content("e"),
        ToolCallStart(0, "c", "f"),
        Arguments(0, "{}"),
        Arguments(1, "[]"),
    ]
    assert joined([]) == []
