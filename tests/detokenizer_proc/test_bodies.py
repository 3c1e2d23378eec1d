"""Whole answers are written a slice at a time, and nothing waits for them."""

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from byte_responses import TABLE, ByteVocabulary, make_plan

from headrace.detokenizer_proc import bodies as bodies_module
from headrace.detokenizer_proc import inflight_responses as responses_module
from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.renderers.json_slices import SLICE_BYTES, slices
from headrace.detokenizer_proc.text import TableVocabulary
from headrace.ipc.messages import (
    MORE,
    Api,
    EmbeddingPlan,
    FinishReason,
    Head,
    SimilarityPlan,
    StepOutput,
    request_id,
)
from headrace.ipc.token_logprobs import TokenLogprob

LONG, OTHER, STREAM = (request_id(0, counter) for counter in (1, 2, 3))
NUM_TOKENS = 3000
LENGTH, ABORT = FinishReason.LENGTH, FinishReason.ABORT
ROW = TokenLogprob(-0.5, 1, [(100 + i, -0.25 * i) for i in range(20)]).pack()


def step(id: int, count: int, finished: FinishReason | None = LENGTH, **fields: Any) -> Any:
    """Return the news of a sequence: its plan, tokens, and how likely they were."""
    plan = msgspec.msgpack.encode(make_plan(**fields))
    logprobs = {id: ROW * count} if "logprobs" in fields else {}
    output = StepOutput.of({id: plan}, [id], [count], [finished], logprobs=logprobs)
    return output, array("I", [97] * count).tobytes()


def rendered(responses: InflightResponses) -> list[tuple[int, Head | None, bytes, int]]:
    """Return what one turn tells the frontend."""
    frames = responses.render(0)
    if frames is None:
        return []
    entries = frames.message().split(frames.data())
    return [(id, head, bytes(data), last) for id, head, data, last, _ in entries]


def body_of(responses: InflightResponses, id: int) -> bytes:
    """Return all slices of an answer."""
    body = b""
    while True:
        for one, head, data, last in rendered(responses):
            assert one == id
            assert (head is None) == (last == MORE), "a head comes with the end"
            body += data
            if last == 1:
                return body
            assert SLICE_BYTES <= len(data) < 2 * SLICE_BYTES


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETION])
def test_sliced_response_is_the_unsliced_one(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for num_bytes in (SLICE_BYTES, 1 << 30):
        monkeypatch.setattr(bodies_module, "SLICE_BYTES", num_bytes)
        monkeypatch.setattr(
            "headrace.detokenizer_proc.renderers.openai.slices",
            partial(slices, num_bytes=num_bytes),
        )
        responses = InflightResponses(ByteVocabulary(), 1)
        responses.feed(*step(LONG, NUM_TOKENS, api=api, logprobs=20))
        found.append(body_of(responses, LONG))
        assert len(responses) == 0
    assert found[0] == found[1]
    logprobs = msgspec.json.decode(found[0])["choices"][0]["logprobs"]
    assert len(logprobs["content" if api is Api.CHAT else "top_logprobs"]) == NUM_TOKENS


def test_streams_are_written_between_slices_of_a_long_answer() -> None:
    responses = InflightResponses(TableVocabulary(TABLE), 1)
    responses.feed(*step(LONG, NUM_TOKENS, logprobs=20))
    for _ in range(3):
        responses.feed(*step(STREAM, 1, None, stream=True))
        ids = [id for id, _, _, _ in rendered(responses)]
        assert ids == [STREAM, LONG]
    assert responses.is_writing


def test_short_answer_does_not_wait_for_a_long_one() -> None:
    responses = InflightResponses(ByteVocabulary(), 1)
    responses.feed(*step(LONG, NUM_TOKENS, logprobs=20))
    rendered(responses)
    responses.feed(*step(OTHER, 3, logprobs=0))
    told = [*rendered(responses), *rendered(responses)]
    assert [(id, last) for id, _, _, last in told if id == OTHER] == [(OTHER, 1)]


def test_long_answers_are_written_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_module, "LONG_BYTES", 1000)
    responses = InflightResponses(ByteVocabulary(), 1)
    for id in (LONG, OTHER):
        responses.feed(*step(id, NUM_TOKENS, logprobs=20))
    for id in (LONG, OTHER):
        body_of(responses, id)


def test_abort_ends_the_writing_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_module, "LONG_BYTES", 1000)
    responses = InflightResponses(ByteVocabulary(), 1)
    for id in (LONG, OTHER):
        responses.feed(*step(id, NUM_TOKENS, logprobs=20))
    rendered(responses)
    responses.feed(StepOutput.of({}, [LONG], [0], [ABORT]), b"")
    body_of(responses, OTHER)
    assert len(responses) == 0


def test_request_in_progress_is_reported_during_its_response() -> None:
    told: list[int] = []
    responses = InflightResponses(ByteVocabulary(), 1, in_progress=told.append)
    responses.feed(*step(LONG, NUM_TOKENS, logprobs=20))
    assert (set(told), told[-1]) == ({LONG, 0}, 0)
    told.clear()
    rendered(responses)
    assert told == [0, LONG, LONG], "between two slices, too"
    responses.feed(*step(OTHER, 1, None, logprobs=0))
    assert told[3:] == [0, OTHER, 0, OTHER, 0, LONG]
    responses.feed(StepOutput.of({}, [LONG], [0], [ABORT]), b"")
    assert told[-1] == 0


def test_what_the_core_writes_is_not_at_hand() -> None:
    told: list[int] = []
    responses = InflightResponses(TableVocabulary(TABLE), 1, in_progress=told.append)
    responses.feed(*step(STREAM, 3, None, stream=True))
    rendered(responses)
    assert set(told) == {0}


@pytest.mark.parametrize("told", [None, 2])
@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETION])
@pytest.mark.parametrize("stream", [False, True])
def test_suspects_are_in_progress_and_rendered_the_same(
    api: Api, stream: bool, told: int | None
) -> None:
    found, in_progress = [], list[int]()
    for is_suspect in (False, True):
        fields = {"api": api, "stream": stream, "num_delivered": told, "is_suspect": is_suspect}
        in_progress.clear()
        responses = InflightResponses(TableVocabulary(TABLE), 1, in_progress=in_progress.append)
        responses.feed(*step(STREAM, 3, None, **fields, include_usage=True))
        entries = rendered(responses)
        responses.feed(StepOutput.of({}, [STREAM], [2], [LENGTH]), array("I", [98, 0]).tobytes())
        entries += rendered(responses)
        assert (STREAM in in_progress) == (is_suspect or not stream)
        found.append((b"".join(data for _, _, data, _ in entries), entries[-1][3]))
    assert found[0] == found[1]


def embeddings(count: int, plan_of: Callable[[int], Any]) -> StepOutput:
    """Return the news of a request of so many texts."""
    ids = [LONG + index for index in range(count)]
    plans = {id: msgspec.msgpack.encode(plan_of(index)) for index, id in enumerate(ids)}
    vectors = {id: array("f", [index, 1.5, -0.1]).tobytes() for index, id in enumerate(ids)}
    ends = [FinishReason.STOP] * count
    return StepOutput.of(plans, ids, [0] * count, ends, embeddings=vectors)


@pytest.mark.parametrize("base64", [False, True])
def test_embeddings_are_written_in_slices(base64: bool) -> None:
    count = 3000
    responses = InflightResponses(ByteVocabulary(), 1)
    responses.feed(embeddings(count, lambda i: EmbeddingPlan("tiny", count, 2, i, base64)), b"")
    assert responses.is_writing
    body = body_of(responses, LONG + count - 1)
    assert len(body) > 2 * SLICE_BYTES
    found = msgspec.json.decode(body)
    assert msgspec.json.encode(found) == body
    assert [one["index"] for one in found["data"]] == list(range(count))
    assert found["usage"] == {"prompt_tokens": 2 * count, "total_tokens": 2 * count}
    assert len(responses) == 0


@pytest.mark.parametrize("ranks", [False, True])
def test_scores_and_ranks_are_written_in_slices(ranks: bool) -> None:
    count = 3000
    plan = SimilarityPlan("x-1", "tiny", 5, count, 2, 0, num_queries=1, ranks=ranks)
    if ranks:
        plan = msgspec.structs.replace(plan, document="text")
    responses = InflightResponses(ByteVocabulary(), 1)
    responses.feed(embeddings(count, lambda i: msgspec.structs.replace(plan, index=i)), b"")
    body = body_of(responses, LONG + count - 1)
    assert len(body) > 2 * SLICE_BYTES
    found = msgspec.json.decode(body)
    assert msgspec.json.encode(found) == body
    assert len(found["results" if ranks else "data"]) == count - 1
