"""A response's sequences become bytes, and its end is where all of them have ended."""

import base64
import json
from array import array
from typing import Any

import msgspec
import pytest
from byte_responses import END, NOTHING, TABLE, ByteVocabulary, make_plan, take

from headrace.detokenizer_proc.frames import Frames
from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.text import (
    TableVocabulary,
    Vocabulary,
)
from headrace.detokenizer_proc.text_response import TextResponse
from headrace.ipc.messages import (
    Api,
    EmbeddingPlan,
    FinishReason,
    Head,
    ResponseFrames,
    ResponsePlan,
    StepOutput,
    StopSequence,
    request_id,
    request_of,
)
from headrace.ipc.token_logprobs import TokenLogprob, packed

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
REFUSED = FinishReason.REFUSED


@pytest.fixture(params=["core", "Python"])
def responses(request: pytest.FixtureRequest) -> InflightResponses:
    """Responses for two frontends, written by the core or not."""
    in_core = request.param == "core"
    vocabulary: Vocabulary = TableVocabulary(TABLE) if in_core else ByteVocabulary()
    return InflightResponses(vocabulary, 2)


def open_response(**fields: Any) -> tuple[TextResponse, bytes]:
    plan = make_plan(**fields)
    response = TextResponse(plan, ByteVocabulary())
    opening = b""
    for index in range(plan.num_sequences):
        sequence = msgspec.structs.replace(plan, index=index, shares_prompt=index > 0)
        opening += response.open(sequence, index, NOTHING)
    return response, opening


def feed(
    response: TextResponse,
    index: int,
    ids: list[int],
    finished: FinishReason | None,
    logprobs: list[TokenLogprob] | None = None,
) -> tuple[bytes, bool]:
    data, stopped_here = response.feed(index, ids, finished, packed(logprobs or []))
    if response.is_complete and not response.streams:
        data = b"".join(response.whole())
    return data, stopped_here


def ids(text: str) -> list[int]:
    return list(text.encode())


def only_choice(body: bytes) -> tuple[str, str]:
    (choice,) = json.loads(body)["choices"]
    return choice["text"], choice["finish_reason"]


def streamed(data: bytes) -> list[tuple[str, str | None]]:
    """Return text and finish reason of each event, but for the last."""
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


def test_a_whole_answer_comes_with_the_last_token() -> None:
    response, _ = open_response()
    assert feed(response, 0, ids("Hel"), None) == (b"", False)
    assert not response.is_complete
    body, _ = feed(response, 0, ids("lo"), LENGTH)
    assert response.is_complete
    assert only_choice(body) == ("Hello", "length")
    assert json.loads(body)["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stop_token_ends_the_text_without_being_in_it() -> None:
    for skip in (True, False):
        response, _ = open_response(skip_special_tokens=skip)
        body, stopped_here = feed(response, 0, [*ids("Hi"), END], STOP)
        assert only_choice(body) == ("Hi", "stop")
        assert json.loads(body)["usage"]["completion_tokens"] == 3
        assert not stopped_here, "the engine knows"


def test_the_stop_token_is_in_the_text_where_that_is_wanted() -> None:
    response, _ = open_response(skip_special_tokens=False, include_stop=True)
    assert only_choice(feed(response, 0, [*ids("Hi"), END], STOP)[0]) == ("Hi<end>", "stop")


def test_stop_string_ends_the_text_and_stops_the_sequence() -> None:
    response, _ = open_response(stop=["ll"])
    assert feed(response, 0, ids("Jel"), None) == (b"", False)
    body, stopped_here = feed(response, 0, ids("lo"), None)
    assert only_choice(body) == ("Je", "stop")
    assert stopped_here
    assert json.loads(body)["usage"]["completion_tokens"] == 4, "the token after it is not read"


def test_a_stop_string_in_the_last_token_is_a_stop() -> None:
    response, _ = open_response(stop=["o"])
    body, stopped_here = feed(response, 0, ids("Hello"), LENGTH)
    assert only_choice(body) == ("Hell", "stop")
    assert not stopped_here, "the engine has ended it too"


def test_text_held_for_a_stop_string_comes_with_the_end() -> None:
    response, _ = open_response(stop=["END"])
    assert only_choice(feed(response, 0, ids("the EN"), LENGTH)[0]) == ("the EN", "length")


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    response, _ = open_response()
    assert only_choice(feed(response, 0, ids("é")[:1], LENGTH)[0]) == ("\ufffd", "length")


def test_tokens_after_a_stop_string_are_not_looked_at() -> None:
    response, _ = open_response(stop=["!"], num_sequences=2)
    assert feed(response, 0, ids("a!"), None) == (b"", True)
    assert feed(response, 0, ids("more"), LENGTH) == (b"", False)
    body, _ = feed(response, 1, ids("b"), LENGTH)
    assert [c["text"] for c in json.loads(body)["choices"]] == ["a", "b"]


def test_choices_are_in_order_however_they_end() -> None:
    response, _ = open_response(num_sequences=3)
    assert feed(response, 2, ids("c"), LENGTH)[0] == b""
    assert feed(response, 0, ids("a"), STOP)[0] == b""
    body = json.loads(feed(response, 1, ids("bb"), LENGTH)[0])
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "length", "length"]
    assert body["usage"]["prompt_tokens"] == 3, "a prompt that is shared counts once"
    assert body["usage"]["completion_tokens"] == 4


def test_response_completes_with_its_last_sequence() -> None:
    plan = make_plan(num_sequences=2)
    response = TextResponse(plan, ByteVocabulary())
    response.open(plan, 0, NOTHING)
    assert feed(response, 0, ids("a"), LENGTH) == (b"", False)
    assert not response.is_complete


def test_a_stream_gives_text_as_it_becomes_certain() -> None:
    response, opening = open_response(stream=True)
    data = opening
    for token in ids("é!"):
        data += feed(response, 0, [token], None)[0]
    data += feed(response, 0, [END], STOP)[0]
    assert streamed(data) == [("é", None), ("!", None), ("", "stop")]


def test_the_echo_goes_before_the_text() -> None:
    response, _ = open_response(echo="1, 2,")
    assert only_choice(feed(response, 0, ids(" 3"), LENGTH)[0]) == ("1, 2, 3", "length")
    response, opening = open_response(echo="1, 2,", stream=True)
    data = opening + feed(response, 0, ids(" 3"), LENGTH)[0]
    assert streamed(data) == [("1, 2,", None), (" 3", "length")]


def test_a_stop_string_in_the_echo_stops_nothing() -> None:
    response, _ = open_response(echo="stop!", stop=["!"])
    assert only_choice(feed(response, 0, ids("no"), LENGTH)[0]) == ("stop!no", "length")


def test_usage_so_far_is_in_every_event_where_that_is_wanted() -> None:
    response, opening = open_response(
        stream=True, api=Api.CHAT, include_usage=True, continuous_usage=True
    )
    data = opening + feed(response, 0, ids("a"), None)[0] + feed(response, 0, ids("bc"), LENGTH)[0]
    events = [json.loads(e.removeprefix("data: ")) for e in data.decode().split("\n\n")[:-2]]
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 3, 3, 3]


# What one step brings for several frontends


def make_output(
    *news: tuple[int, str, FinishReason | None], started: dict[int, ResponsePlan] | None = None
) -> tuple[StepOutput, bytes]:
    plans = {id: msgspec.msgpack.encode(plan) for id, plan in (started or {}).items()}
    tokens = [ids(text) for _, text, _ in news]
    output = StepOutput.of(
        plans, [n[0] for n in news], [len(t) for t in tokens], [n[2] for n in news]
    )
    return output, array("I", [id for t in tokens for id in t]).tobytes()


def ends(frames: Frames) -> list[tuple[int, bool]]:
    """Return each request that has bytes, and whether they end its response."""
    return [(id, last) for id, _, _, last, _ in frames.message().split(frames.data())]


A, B, C = request_id(0, 1), request_id(0, 2), request_id(1, 1)


def test_each_frontend_gets_one_message_with_what_is_its_own(responses: InflightResponses) -> None:
    started = {id: make_plan(stream=True, response_id=f"r{id}") for id in (A, B, C)}
    news = [(A, "a", None), (C, "c", None), (B, "b", LENGTH)]
    outgoing, stops = take(responses, *make_output(*news, started=started))
    assert stops == []
    assert outgoing.keys() == {0, 1}
    message, data = outgoing[0].message(), outgoing[0].data()
    entries = {id: (bytes(entry), last) for id, _, entry, last, _ in message.split(data)}
    assert [last for _, last in entries.values()] == [False, True]
    assert sum(len(entry) for entry, _ in entries.values()) == len(data)
    assert b'"text":"a"' in entries[A][0]
    assert data.endswith(b"data: [DONE]\n\n")
    assert ends(outgoing[1]) == [(C, False)]
    assert len(responses) == 2, "B is done"


def test_the_head_comes_with_the_first_bytes_and_only_there(responses: InflightResponses) -> None:
    first, _ = take(responses, *make_output((A, "a", None), started={A: make_plan(stream=True)}))
    assert first[0].message().heads == {A: Head(200, "text/event-stream; charset=utf-8")}
    second, _ = take(responses, *make_output((A, "b", None)))
    assert second[0].message().heads == {}


def test_last_entry_of_a_request_ends_all_its_sequences(responses: InflightResponses) -> None:
    started = {A + i: make_plan(stream=True, num_sequences=2, index=i) for i in range(2)}
    outgoing, _ = take(
        responses, *make_output((A, "a", LENGTH), (A + 1, "b", STOP), started=started)
    )
    *before, end = ends(outgoing[0])
    assert (request_of(end[0]), end[1]) == (A, True)
    assert set(before) <= {(A, False), (A + 1, False)}
    assert len(responses) == 0


def test_sequence_begun_in_another_process_is_skipped(responses: InflightResponses) -> None:
    for fields in ({}, {"return_token_ids": True}):  # in the core and beside it
        plan = make_plan(stream=True, num_sequences=2, index=1, **fields)
        output = make_output((A, "a", None), (A + 1, "b", None), started={A + 1: plan})
        outgoing, stops = take(responses, *output)
        assert b"error" not in outgoing[0].data()
        assert (stops, len(responses)) == ([], 1)
        take(responses, *make_output((A, "", ABORT)))
        assert len(responses) == 0


def test_a_step_without_bytes_sends_nothing(responses: InflightResponses) -> None:
    outgoing, _ = take(responses, *make_output((A, "a", None), started={A: make_plan()}))
    assert outgoing == {}
    assert len(responses) == 1


def test_a_stop_string_is_sent_to_the_engine_once(responses: InflightResponses) -> None:
    started = {A: make_plan(stop=["!"])}
    outgoing, stops = take(responses, *make_output((A, "a!", None), started=started))
    assert stops == [StopSequence(A)]
    assert ends(outgoing[0]) == [(A, True)]
    assert take(responses, *make_output((A, "more", None))) == ({}, [])


def test_an_aborted_response_is_forgotten(responses: InflightResponses) -> None:
    take(responses, *make_output((A, "a", None), started={A: make_plan()}))
    assert take(responses, *make_output((A, "", ABORT))) == ({}, [])
    assert len(responses) == 0


def test_output_after_an_abort_goes_to_no_other_request(responses: InflightResponses) -> None:
    started = {A: make_plan(), B: make_plan()}
    take(responses, *make_output((A, "a", None), (B, "b", None), started=started))
    take(responses, *make_output((A, "", ABORT)))
    outgoing, _ = take(responses, *make_output((A, "xx", None), (B, "c", LENGTH)))
    assert only_choice(outgoing[0].data()) == ("bc", "length")


def test_frames_go_as_they_came() -> None:
    frames = Frames()
    head = Head(200, "x")
    for id, data in [(A, b"a1"), (B, b"b"), (A + 1, b"a2")]:
        frames.add(id, head, data, False, len(data))
    assert frames.data() == b"a1ba2"
    columns = [A, B, A + 1], [2, 1, 2], [False] * 3, [2, 1, 2]
    assert frames.message() == ResponseFrames.of({A: head, B: head}, *columns)


def test_a_refused_request_is_a_429_and_leaves_nothing(responses: InflightResponses) -> None:
    started = {C: make_plan(stream=True)}
    outgoing, stops = take(responses, *make_output((C, "", REFUSED), started=started))
    assert outgoing[1].message().heads == {C: Head(429, "application/json")}
    assert ends(outgoing[1]) == [(C, True)]
    error = json.loads(outgoing[1].data())["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "--max-num-queued" in error["message"]
    assert (stops, len(responses)) == ([], 0)


# How likely tokens were


def likely(logprob: float, *top: tuple[str, float], rank: int = 1) -> TokenLogprob:
    return TokenLogprob(logprob, rank, [(ord(text), logprob) for text, logprob in top])


def test_logprobs_of_a_chat() -> None:
    response, _ = open_response(api=Api.CHAT, logprobs=1)
    data, _ = feed(
        response, 0, ids("ab"), LENGTH, [likely(-0.5, ("a", -0.5)), likely(-2, ("c", -1))]
    )
    (choice,) = json.loads(data)["choices"]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
            },
            {
                "token": "b",
                "logprob": -2,
                "bytes": [98],
                "top_logprobs": [{"token": "c", "logprob": -1, "bytes": [99]}],
            },
        ],
        "refusal": None,
    }


def test_logprobs_of_a_completion_have_the_token_itself() -> None:
    response, _ = open_response(logprobs=1)
    given = [likely(-0.5, ("a", -0.5)), likely(-2, ("c", -1))]
    (choice,) = json.loads(feed(response, 0, ids("ab"), LENGTH, given)[0])["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -2],
        "tokens": ["a", "b"],
        "top_logprobs": [{"a": -0.5}, {"b": -2, "c": -1}],
    }


def test_no_logprob_is_lost_while_text_is_held_back() -> None:
    response, opening = open_response(stream=True, logprobs=0, stop=["ab!"])
    data = opening
    for token in ids("aab"):
        data += feed(response, 0, [token], None, [likely(-token)])[0]
    data += feed(response, 0, [END], STOP, [likely(-7)])[0]
    chunks = [json.loads(e[6:])["choices"][0] for e in data.decode().split("\n\n")[:-2]]
    told = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    assert [one["tokens"] for one in told] == [["a"], ["a", "b"]]
    assert [one["text_offset"] for one in told] == [[0], [1, 2]]
    assert "".join(chunk["text"] for chunk in chunks) == "aab"


@pytest.mark.parametrize(("include_stop", "tokens"), [(False, ["a"]), (True, ["a", "E", "N", "D"])])
def test_tokens_that_a_stop_string_cuts_off_are_left_out(
    include_stop: bool, tokens: list[str]
) -> None:
    for stream in (False, True):
        response, opening = open_response(
            stream=stream, logprobs=0, stop=["END"], include_stop=include_stop
        )
        data, stopped_here = feed(response, 0, ids("aENDmore"), None, [likely(-1)] * 8)
        assert stopped_here
        body = (opening + data).decode().removeprefix("data: ").split("\n\n")[0]
        assert json.loads(body)["choices"][0]["logprobs"]["tokens"] == tokens


def test_a_special_token_that_is_skipped_is_reported_at_the_end() -> None:
    response, _ = open_response(logprobs=0)
    data, _ = feed(response, 0, [*ids("a"), END], LENGTH, [likely(-1), likely(-2)])
    (choice,) = json.loads(data)["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("a", ["a", "<end>"])
    assert choice["logprobs"]["text_offset"] == [0, 1]


def test_offsets_are_those_of_the_text_and_not_of_its_tokens() -> None:
    response, _ = open_response(logprobs=0, echo="1,")
    (choice,) = json.loads(feed(response, 0, ids("éa"), LENGTH, [likely(-1)] * 3)[0])["choices"]
    assert choice["text"] == "1,éa"
    assert choice["logprobs"]["text_offset"] == [2, 2, 3]


def test_chosen_token_is_reported_among_equal_texts() -> None:
    response, _ = open_response(logprobs=1)
    first, second = "é".encode()
    top = TokenLogprob(-3, 2, [(first, -0.5)])
    (choice,) = json.loads(feed(response, 0, [second], LENGTH, [top])[0])["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -3}]


def test_a_token_that_is_no_character_shows_its_bytes() -> None:
    response, _ = open_response(api=Api.CHAT, logprobs=0)
    data, _ = feed(response, 0, ids("é"), LENGTH, [likely(-1), likely(-1)])
    content = json.loads(data)["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["bytes"]) for one in content] == [
        ("\ufffd", [0xC3]),
        ("\ufffd", [0xA9]),
    ]


def test_what_cannot_be_has_openais_lowest_number() -> None:
    response, _ = open_response(logprobs=0)
    (choice,) = json.loads(feed(response, 0, ids("a"), LENGTH, [likely(float("-inf"))])[0])[
        "choices"
    ]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]


def watched_output(prompt: str) -> StepOutput:
    told = [likely(-i, ("z", -0.5), rank=i) for i in range(1, len(prompt))]
    plans = array("I", ids(prompt)).tobytes()
    return StepOutput.of({}, [], [], [], prompts={0: plans}, prompt_logprobs={0: packed(told)})


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_has_logprobs_but_for_its_first_token(stream: bool) -> None:
    plan = make_plan(echo="abc", logprobs=0, stream=stream)
    response = TextResponse(plan, ByteVocabulary())
    data = response.open(plan, 0, watched_output("abc"))
    data += feed(response, 0, ids("d"), LENGTH, [likely(-9)])[0]
    if stream:
        events = data.decode().split("\n\n")[:-2]
        logprobs = [json.loads(e[6:])["choices"][0]["logprobs"] for e in events]
    else:
        logprobs = [json.loads(data)["choices"][0]["logprobs"]]
    assert [x for one in logprobs for x in one["tokens"]] == ["a", "b", "c", "d"]
    assert [x for one in logprobs for x in one["token_logprobs"]] == [None, -1, -2, -9]
    assert [x for one in logprobs for x in one["text_offset"]] == [0, 1, 2, 3]


def test_prompt_logprobs_are_vllms() -> None:
    for api in (Api.CHAT, Api.COMPLETION):
        plan = make_plan(api=api, prompt_logprobs=1)
        response = TextResponse(plan, ByteVocabulary())
        response.open(plan, 0, watched_output("abz"))
        body = json.loads(feed(response, 0, ids("d"), LENGTH)[0])
        told = body["prompt_logprobs"] if api is Api.CHAT else body["choices"][0]["prompt_logprobs"]
        assert told == [
            None,
            {
                "98": {"logprob": -1, "rank": 1, "decoded_token": "b"},
                "122": {"logprob": -0.5, "rank": 1, "decoded_token": "z"},
            },
            {"122": {"logprob": -2, "rank": 2, "decoded_token": "z"}},
        ]


def test_the_best_of_several_are_returned_and_all_are_counted() -> None:
    response, _ = open_response(num_sequences=6, best_of=3, n=2)
    means = [-3.0, -1.0, -2.0, -5.0, -6.0, -4.0]
    for index, mean in enumerate(means):
        tokens = ids(chr(ord("a") + index) * (1 + index % 2))
        data, _ = feed(response, index, tokens, LENGTH, [likely(mean)] * len(tokens))
    body = json.loads(data)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "bb"),
        (1, "c"),
        (2, "ff"),
        (3, "dd"),
    ]
    assert body["usage"]["completion_tokens"] == 9
    assert all(choice["logprobs"] is None for choice in body["choices"])


def test_stop_strings_wait_for_min_tokens() -> None:
    response, _ = open_response(stop=["!"], min_tokens=2)
    body, stopped_here = feed(response, 0, ids("!!a!"), None)
    assert only_choice(body) == ("!!a", "stop")
    assert stopped_here


# Embeddings


def embedding_output(vectors: dict[int, list[float]], **fields: Any) -> tuple[StepOutput, bytes]:
    plans = {}
    for id in vectors:
        plan = EmbeddingPlan("tiny", 2, 5, id - A, **({"base64": False} | fields))
        plans[id] = msgspec.msgpack.encode(plan)
    num = len(vectors)
    raw = {id: array("f", vector).tobytes() for id, vector in vectors.items()}
    return StepOutput.of(plans, list(vectors), [0] * num, [STOP] * num, embeddings=raw), b""


def test_embeddings_are_answered_together_and_in_order(responses: InflightResponses) -> None:
    assert take(responses, *embedding_output({A + 1: [0.5, 0.25]})) == ({}, [])
    outgoing, _ = take(responses, *embedding_output({A: [1, 0]}))
    assert outgoing[0].message().heads == {A: Head(200, "application/json")}
    assert json.loads(outgoing[0].data()) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1, 0]},
            {"object": "embedding", "index": 1, "embedding": [0.5, 0.25]},
        ],
        "model": "tiny",
        "usage": {"prompt_tokens": 10, "total_tokens": 10},
    }
    assert len(responses) == 0


def test_embeddings_in_base64_and_shortened(responses: InflightResponses) -> None:
    vectors: dict[int, list[float]] = {A: [3, 4, 12], A + 1: [0, 0, 1]}
    outgoing, _ = take(responses, *embedding_output(vectors, base64=True, dimensions=2))
    told = [one["embedding"] for one in json.loads(outgoing[0].data())["data"]]
    decoded = [array("f", base64.b64decode(text)).tolist() for text in told]
    assert decoded == [pytest.approx([0.6, 0.8]), [0, 0]]


def test_embeddings_of_aborted_requests_are_dropped(responses: InflightResponses) -> None:
    take(responses, *embedding_output({A: [1, 0]}))
    take(responses, *make_output((A + 1, "", ABORT)))
    assert len(responses) == 0


# Token ids


PROMPT = array("I", [7, 8]).tobytes()


def test_token_ids_are_all_that_was_computed_and_the_prompts() -> None:
    response, _ = open_response(stop=["!"], return_token_ids=True, prompt_token_ids=PROMPT)
    feed(response, 0, ids("ab"), None)
    body, _ = feed(response, 0, ids("!c"), None)
    (choice,) = json.loads(body)["choices"]
    assert (choice["text"], choice["token_ids"]) == ("ab", ids("ab!"))
    assert choice["prompt_token_ids"] == [7, 8]
    assert json.loads(body)["usage"]["completion_tokens"] == 3


def test_a_chat_reports_its_prompt_once() -> None:
    fields: dict[str, Any] = {"api": Api.CHAT, "n": 2, "best_of": 2, "num_sequences": 2}
    response, _ = open_response(**fields, return_token_ids=True, prompt_token_ids=PROMPT)
    feed(response, 0, [*ids("a"), END], STOP)
    body = json.loads(feed(response, 1, ids("b"), LENGTH)[0])
    assert body["prompt_token_ids"] == [7, 8]
    assert [choice["token_ids"] for choice in body["choices"]] == [[*ids("a"), END], ids("b")]
    assert all("prompt_token_ids" not in choice for choice in body["choices"])


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETION])
def test_a_stream_reports_tokens_with_each_event(responses: InflightResponses, api: Api) -> None:
    plan = make_plan(
        api=api,
        stream=True,
        return_token_ids=True,
        prompt_token_ids=PROMPT,
    )
    fox = ids("🦊")
    data = b""
    for new, finished in ((fox[:2], None), (fox[2:], None), ([END], STOP)):
        started = {A: msgspec.msgpack.encode(plan)} if not data else {}
        output = StepOutput.of(started, [A], [len(new)], [finished])
        outgoing, _ = take(responses, output, array("I", new).tobytes())
        data += outgoing[0].data()
    events = [json.loads(e[6:]) for e in data.decode().split("\n\n") if e.startswith("data: {")]
    owner = events[0] if api is Api.CHAT else events[0]["choices"][0]
    assert owner["prompt_token_ids"] == [7, 8]
    assert sum("prompt_token_ids" in str(event) for event in events) == 1
    choices = [event["choices"][0] for event in events]
    assert [c["token_ids"] for c in choices if c.get("token_ids")] == [fox[:2], fox[2:], [END]]
    texts = [c["delta"].get("content", "") if api is Api.CHAT else c["text"] for c in choices]
    assert "".join(texts) == "🦊"
    assert choices[-1]["finish_reason"] == "stop"
