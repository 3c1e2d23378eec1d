"""An answer of `/generate` is SGLang's."""

import json
from array import array
from typing import Any

import msgspec
import pytest
from byte_responses import END, NOTHING, ByteVocabulary, make_plan

from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.renderers.renderer import Choice, TokenUsage
from headrace.detokenizer_proc.renderers.sglang import GenerateRenderer
from headrace.detokenizer_proc.text_response import TextResponse
from headrace.ipc.messages import (
    Api,
    FinishReason,
    GenerateForm,
    ResponsePlan,
    StepOutput,
)
from headrace.ipc.token_logprobs import TokenLogprob, packed
from headrace.response_bodies.sglang_generate import Generated, GenerateEvent

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
USAGE = TokenUsage(num_prompt=3, num_completion=2, num_cached=1)


def make_generate_plan(form: dict[str, Any] | None = None, **fields: Any) -> ResponsePlan:
    defaults: dict[str, Any] = {
        "is_list": False,
        "received_at": 100.0,
        "ids": [],
        "num_each": 1,
        "tells_token_text": True,
        "num_logprobs": [None],
        "first_logprob": [None],
    }
    given: dict[str, Any] = {
        "api": Api.GENERATE,
        "form": GenerateForm(**(defaults | (form or {}))),
        "continuous_usage": True,
        "return_token_ids": True,
    }
    return make_plan(**(given | fields))


def make_renderer(plan: ResponsePlan) -> GenerateRenderer:
    return GenerateRenderer(plan, lambda: 100.25)


def checked(body: bytes) -> Any:
    """Return an answer that is as it is described."""
    msgspec.json.decode(body, type=Generated)
    return json.loads(body)


def events(data: bytes) -> list[Any]:
    *found, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    told = [event.removeprefix("data: ") for event in found]
    for event in told:
        msgspec.json.decode(event, type=GenerateEvent)
    return [json.loads(event) for event in told]


def test_a_whole_answer() -> None:
    answer = Choice("hi", STOP, token_ids=[104, 105, END], stopped_by=END, usage=USAGE)
    assert checked(b"".join(make_renderer(make_generate_plan()).whole([answer], USAGE))) == {
        "text": "hi",
        "output_ids": [104, 105, END],
        "meta_info": {
            "id": "x-1",
            "finish_reason": {"type": "stop", "matched": END},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 1,
            "e2e_latency": 0.25,
        },
    }


def test_a_batch_is_a_list_whose_ids_are_the_clients() -> None:
    answers = [Choice(text, LENGTH, token_ids=[1], usage=USAGE) for text in "abcd"]
    plan = make_generate_plan({"is_list": True, "ids": ["p", "q"], "num_each": 2}, num_sequences=4)
    bodies = checked(b"".join(make_renderer(plan).whole(answers, USAGE)))
    assert [body["meta_info"]["id"] for body in bodies] == ["p_0", "p_1", "q_0", "q_1"]
    assert [body["text"] for body in bodies] == list("abcd")
    assert bodies[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


def test_each_event_has_all_of_the_text_so_far() -> None:
    renderer = make_renderer(make_generate_plan(stream=True))
    data = renderer.opening(0, USAGE)
    data += renderer.delta(0, [Content("h")], None, usage=USAGE, token_ids=[104])
    data += renderer.delta(0, [], None, usage=USAGE, token_ids=[105])
    data += renderer.delta(0, [Content("i")], STOP, None, USAGE, [END], "##")
    found = events(data + renderer.closing(USAGE))
    assert [event["text"] for event in found] == ["h", "h", "hi"]
    assert [event["output_ids"] for event in found] == [[104], [104, 105], [104, 105, END]]
    ends = [event["meta_info"]["finish_reason"] for event in found]
    assert ends == [None, None, {"type": "stop", "matched": "##"}]
    assert "index" not in found[0]


def test_events_of_a_batch_say_which_sequence_they_are_of() -> None:
    renderer = make_renderer(make_generate_plan({"is_list": True}, stream=True, num_sequences=2))
    data = renderer.opening(0, USAGE) + renderer.opening(1, USAGE)
    data += renderer.delta(1, [Content("b")], LENGTH, usage=USAGE, token_ids=[98])
    data += renderer.delta(0, [Content("a")], LENGTH, usage=USAGE, token_ids=[97])
    found = events(data + renderer.closing(USAGE))
    assert [(event["index"], event["text"]) for event in found] == [(1, "b"), (0, "a")]


def likely(token: int) -> TokenLogprob:
    return TokenLogprob(-token / 128, 1, [(token, -token / 128), (1, -9.0)])


def told(stream: bool, generates: bool = True, **form: Any) -> Any:
    """Return the answer "hi", or nothing, to the prompt "abc", with log probabilities."""
    plan = make_generate_plan(
        {"num_logprobs": [1]} | form,
        logprobs=1,
        stream=stream,
        prompt_logprobs=None if stream else 1,
        stop=["i"],
    )
    output = StepOutput.of(
        {},
        [],
        [],
        [],
        prompts={0: array("I", [97, 98, 99]).tobytes()},
        prompt_logprobs={0: packed([likely(98), likely(99)])},
    )
    response = TextResponse(plan, ByteVocabulary())
    data = response.open(plan, 0, NOTHING if stream else output)
    for token in b"hi" if generates else b"":
        data += response.feed(0, [token], None, likely(token).pack())[0]
    if not generates:
        data += response.feed(0, [], LENGTH, b"")[0]
    return events(data)[-1] if stream else checked(b"".join(response.whole()))


def test_log_probabilities_are_those_of_all_output_ids() -> None:
    for stream in (True, False):
        answer = told(stream, first_logprob=[None if stream else 1])
        meta = answer["meta_info"]
        assert (answer["text"], answer["output_ids"]) == ("h", [104, 105])
        assert meta["output_token_logprobs"] == [[-0.8125, 104, "h"], [-0.8203125, 105, "i"]]
        assert meta["output_top_logprobs"] == [[[-0.8125, 104, "h"]], [[-0.8203125, 105, "i"]]]
        assert meta["completion_tokens"] == 2


def test_prompt_logprobs_begin_with_a_token_without_one() -> None:
    meta = told(False, first_logprob=[0])["meta_info"]
    expected = [[None, 97, "a"], [-0.765625, 98, "b"], [-0.7734375, 99, "c"]]
    assert meta["input_token_logprobs"] == expected
    assert meta["input_top_logprobs"] == [None, [[-0.765625, 98, "b"]], [[-0.7734375, 99, "c"]]]
    meta = told(False, first_logprob=[1])["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 98, "b"], expected[2]]
    assert told(False)["meta_info"]["input_token_logprobs"] == []


@pytest.mark.parametrize("stream", [True, False])
def test_each_prompt_has_the_log_probabilities_it_asked_for(stream: bool) -> None:
    form = {"is_list": True, "num_logprobs": [None, 0, 1], "first_logprob": [None] * 3}
    plans = [
        make_generate_plan(form, logprobs=wanted, stream=stream, num_sequences=3, index=index)
        for index, wanted in enumerate([None, 0, 1])
    ]
    response = TextResponse(plans[0], ByteVocabulary())
    data = b"".join(response.open(plan, plan.index, NOTHING) for plan in plans)
    for plan in plans:
        told = b"" if plan.logprobs is None else likely(104).pack()
        data += response.feed(plan.index, [104], LENGTH, told)[0]
    data += b"" if stream else b"".join(response.whole())
    metas = [one["meta_info"] for one in (events(data) if stream else checked(data))]
    assert "output_token_logprobs" not in metas[0]
    for meta in metas[1:]:
        assert meta["output_token_logprobs"] == [[-0.8125, 104, "h"]]
    assert "output_top_logprobs" not in metas[1]
    assert metas[2]["output_top_logprobs"] == [[[-0.8125, 104, "h"]]]


def test_token_texts_are_reported_only_on_request() -> None:
    meta = told(False, tells_token_text=False)["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.8125, 104, None], [-0.8203125, 105, None]]


def test_of_a_prompt_that_is_only_scored_no_output_is_reported() -> None:
    answer = told(False, generates=False, first_logprob=[0])
    assert (answer["text"], answer["output_ids"]) == ("", [])
    meta = answer["meta_info"]
    assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert len(meta["input_token_logprobs"]) == 3
