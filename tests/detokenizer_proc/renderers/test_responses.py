"""A response is OpenAI's, whole and streamed, as its own client reads them."""

import json
from typing import Any

import msgspec
import pytest
from byte_responses import NOTHING, ByteVocabulary, make_plan
from named_events import PIECES as SAID
from named_events import named_events
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from headrace.detokenizer_proc.parsers.pieces import (
    Arguments,
    Content,
    Piece,
    gathered,
)
from headrace.detokenizer_proc.renderers.renderer import Choice, TokenUsage
from headrace.detokenizer_proc.renderers.responses import ResponsesRenderer
from headrace.detokenizer_proc.text_response import TextResponse
from headrace.errors import InternalError
from headrace.ipc.messages import Api, FinishReason, ResponsePlan, ResponsesForm
from headrace.ipc.token_logprobs import TokenLogprob
from headrace.model.sampling_defaults import OPENAI
from headrace.response_bodies import openai_responses
from headrace.tokenizer_proc.requests.responses import decode_responses, echo_of

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
USAGE = TokenUsage(num_prompt=9, num_completion=4, num_cached=2)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ECHO = echo_of(decode_responses(b'{"input": "Hi", "metadata": {"a": "b"}}'), OPENAI)
PIECES = [*SAID, Arguments(1, "{}")]


def make_response_plan(**fields: Any) -> ResponsePlan:
    form = ResponsesForm(ECHO)
    return make_plan(**({"api": Api.RESPONSES, "form": form, "response_id": "resp_1"} | fields))


def events(data: bytes) -> list[Any]:
    """Return the events in `data`, checked by the client's types and in their order."""
    found = named_events(data, EVENT)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    msgspec.convert(found, list[openai_responses.ResponseEvent])
    return found


def stream_of(
    pieces: list[Piece], finished: FinishReason, renderer: ResponsesRenderer | None = None
) -> list[Any]:
    renderer = renderer or ResponsesRenderer(make_response_plan(stream=True))
    data = renderer.opening(0)
    data += b"".join(renderer.delta(0, [piece], None) for piece in pieces)
    return events(data + renderer.delta(0, [], finished) + renderer.closing(USAGE))


@pytest.mark.parametrize("pieces", [PIECES, PIECES[2:4], PIECES[4:], [], PIECES[:1]])
@pytest.mark.parametrize("finished", [STOP, LENGTH])
def test_a_stream_says_what_the_whole_response_says(
    pieces: list[Piece], finished: FinishReason
) -> None:
    found = stream_of(pieces, finished)
    text, thought, calls = gathered(pieces)
    answer = Choice(text, finished, thought=thought, calls=calls)
    body = b"".join(ResponsesRenderer(make_response_plan()).whole([answer], USAGE))
    whole = json.loads(body)
    Response.model_validate(whole)
    msgspec.json.decode(body, type=openai_responses.Response)
    assert found[-1]["response"] == whole
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    grown = dict.fromkeys(range(len(done)), "")
    for event in found:
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] += event["delta"]
    said = [
        item.get("arguments") or "".join(p["text"] for p in item.get("content", []))
        for item in done
    ]
    assert list(grown.values()) == said


def test_items_are_what_the_pieces_are() -> None:
    output = stream_of(PIECES, STOP)[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert output[2]["call_id"] == "call_1"
    assert json.loads(output[2]["arguments"]) == {"at": "sea"}
    assert len({item["id"] for item in output}) == 4


def test_a_response_that_was_cut_off_says_so() -> None:
    last = stream_of([Content("a")], LENGTH)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_a_response_repeats_its_request() -> None:
    for event in (stream_of([], STOP)[0], stream_of([], STOP)[-1]):
        assert event["response"].items() >= json.loads(ECHO).items()


def test_usage_is_the_whole_requests() -> None:
    usage = stream_of([], STOP)[-1]["response"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (9, 4, 13)
    assert usage["input_tokens_details"]["cached_tokens"] == 2


def test_a_stream_that_fails_ends_so() -> None:
    renderer = ResponsesRenderer(make_response_plan(stream=True))
    data = renderer.opening(0) + renderer.delta(0, [Content("a")], None)
    last = events(data + renderer.failure(InternalError()))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"


def test_logprobs_are_reported_once_each() -> None:
    plan = make_response_plan(stream=True, logprobs=1, stop=["##"])
    response = TextResponse(plan, ByteVocabulary())
    data = response.open(plan, 0, NOTHING)
    for token in b"a#b##c":
        likely = TokenLogprob(-0.5, 1, [(token, -0.5)])
        data += response.feed(0, [token], None, likely.pack())[0]
    found = events(data)
    told = [one for event in found for one in event.get("logprobs", []) if "delta" in event]
    assert [one["token"] for one in told] == ["a", "#", "b"]
    (part,) = found[-1]["response"]["output"][0]["content"]
    assert (part["text"], part["logprobs"]) == ("a#b", told)
