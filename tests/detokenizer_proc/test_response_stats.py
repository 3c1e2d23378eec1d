"""Statistics of responses for spans, counted beside the rendering."""

import msgspec
from byte_responses import make_plan

from headrace.detokenizer_proc.response_stats import ResponseStatsCollector
from headrace.ipc.messages import (
    EmbeddingPlan,
    FinishReason,
    Head,
    Plan,
    ReportedSampling,
    ResponseFrames,
    ResponseStats,
    StepOutput,
    request_id,
)

ONE, OTHER = request_id(0, 1), request_id(0, 2)
SAMPLING = ReportedSampling(9, 0.5, 1.0, 1)
HEAD = Head(200, "application/json")


def step(
    started: dict[int, Plan], rows: list[tuple[int, int, FinishReason | None]], **fields: object
) -> StepOutput:
    encoded = {id: msgspec.msgpack.encode(plan) for id, plan in started.items()}
    return StepOutput.of(encoded, *zip(*rows, strict=True), **fields)


def reported(stats: ResponseStatsCollector, frames: ResponseFrames) -> dict[int, ResponseStats]:
    found = stats.add_to(frames, now_ns=99).stats
    return {id: msgspec.msgpack.decode(data, type=ResponseStats) for id, data in found.items()}


def frames_of(id: int, head: Head | None = None, last: int = False) -> ResponseFrames:
    return ResponseFrames.of({} if head is None else {id: head}, [id], [3], [last])


def test_counts_go_with_the_first_and_the_last_bytes() -> None:
    stats = ResponseStatsCollector()
    plan = msgspec.structs.replace(make_plan(stream=True), num_prompt_tokens=7, sampling=SAMPLING)
    stats.feed(step({ONE: plan}, [(ONE, 1, None)], cached={ONE: 4}), now_ns=10)
    first = reported(stats, frames_of(ONE, HEAD))[ONE]
    assert (first.num_prompt, first.num_cached, first.num_generated) == (7, 4, 1)
    assert first.sampling == SAMPLING
    stats.feed(step({}, [(ONE, 2, None)]), now_ns=20)
    assert reported(stats, frames_of(ONE)) == {}
    stats.feed(step({}, [(ONE, 1, FinishReason.LENGTH)]), now_ns=30)
    last = reported(stats, frames_of(ONE, last=True))[ONE]
    assert (last.num_generated, last.last_token, last.rendered) == (4, 30, 99)
    assert last.finish_reasons == ["length"]
    assert reported(stats, frames_of(ONE, HEAD, last=True)) == {}, "it is forgotten"


def test_sequences_that_share_a_prompt_count_it_once() -> None:
    stats = ResponseStatsCollector()
    plan = msgspec.structs.replace(make_plan(stream=True), num_prompt_tokens=7, num_sequences=2)
    second = msgspec.structs.replace(plan, index=1, shares_prompt=True)
    rows = [(ONE, 1, FinishReason.STOP), (ONE + 1, 1, FinishReason.LENGTH)]
    stats.feed(step({ONE: plan, ONE + 1: second}, rows), now_ns=10)
    found = reported(stats, frames_of(ONE + 1, HEAD, last=True))[ONE]
    assert (found.num_prompt, found.num_generated, found.num_sequences) == (7, 2, 2)
    assert found.finish_reasons == ["stop", "length"]


def test_stop_strings_end_sequences_the_engine_has_not_ended() -> None:
    stats = ResponseStatsCollector()
    stats.feed(step({ONE: make_plan(stream=True)}, [(ONE, 3, None)]), now_ns=10)
    assert reported(stats, frames_of(ONE, HEAD))[ONE].finish_reasons == []
    assert reported(stats, frames_of(ONE, last=True))[ONE].finish_reasons == ["stop"]


def test_embeddings_have_prompts_and_no_ends() -> None:
    stats = ResponseStatsCollector()
    plan = EmbeddingPlan("tiny", num_sequences=1, num_prompt_tokens=5, index=0, base64=False)
    output = step({ONE: plan}, [(ONE, 0, FinishReason.STOP)], embeddings={ONE: b"\0" * 4})
    stats.feed(output, now_ns=10)
    found = reported(stats, frames_of(ONE, HEAD, last=True))[ONE]
    assert (found.num_prompt, found.finish_reasons, found.sampling) == (5, [], None)


def test_aborted_responses_are_forgotten_and_failed_kept() -> None:
    stats = ResponseStatsCollector()
    plan = make_plan(stream=True)
    stats.feed(step({ONE: plan, OTHER: plan}, [(ONE, 1, None), (OTHER, 1, None)]), now_ns=10)
    rows = [(ONE, 0, FinishReason.ABORT), (OTHER, 0, FinishReason.ABORT)]
    stats.feed(step({}, rows, failed={OTHER: msgspec.msgpack.encode(plan)}), now_ns=20)
    assert reported(stats, frames_of(ONE, last=True)) == {}
    assert reported(stats, frames_of(OTHER, last=True))[OTHER].failed
