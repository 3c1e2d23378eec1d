"""Answers are compared by what they come to."""

from array import array

import msgspec

from headrace.cli.replay_compare import (
    ReplayedResponses,
    comparable,
    compare,
    merged,
    outcomes,
    responses_of,
)
from headrace.ipc.messages import (
    Abort,
    FinishReason,
    GenerateRequest,
    Head,
    ResponseFrames,
    Sampling,
    StepOutput,
    StopSequence,
    Times,
    request_id,
)

EVENTS = Head(200, "text/event-stream; charset=utf-8")
ONE, TWO = request_id(0, 1), request_id(0, 2)


def event(text: str, index: int = 0, **more: object) -> bytes:
    choice = {"index": index, "delta": {"content": text}, **more}
    return b"data: " + msgspec.json.encode({"id": "x", "choices": [choice]}) + b"\n\n"


def frames(id: int, *pieces: bytes, last: bool = True) -> tuple[ResponseFrames, bytes]:
    ends = [last and piece is pieces[-1] for piece in pieces]
    lengths = [len(piece) for piece in pieces]
    message = ResponseFrames.of({id: EVENTS}, [id] * len(pieces), lengths, ends)
    return message, b"".join(pieces)


def step(id: int, *tokens: int, end: FinishReason | None = None) -> tuple[StepOutput, bytes]:
    return StepOutput.of({}, [id], [len(tokens)], [end]), array("I", tokens).tobytes()


def request(id: int, **fields: object) -> GenerateRequest:
    return GenerateRequest(id, 0, 5, Sampling(), [], b"plan", **fields)  # type: ignore[arg-type]


def test_a_stream_is_the_same_however_its_text_is_cut_up() -> None:
    pieces = event("a") + event("x", 1) + event("b") + event("", finish_reason="stop")
    whole = event("x", 1) + event("ab") + event("", finish_reason="stop")
    assert merged(pieces + b"data: [DONE]\n\n") == merged(whole + b"data: [DONE]\n\n")
    assert merged(pieces) != merged(whole + b"data: [DONE]\n\n")
    assert merged(pieces) != merged(event("x") + event("ab", 1) + event("", finish_reason="stop"))
    assert merged(event("a")) != merged(event("b"))


def test_event_lists_are_joined_and_their_numbers_ignored() -> None:
    def counted(number: int, ids: list[int]) -> bytes:
        fields = {"type": "t", "sequence_number": number, "token_ids": ids}
        return b"data: " + msgspec.json.encode(fields) + b"\n\n"

    assert merged(counted(1, [1]) + counted(2, [2])) == merged(counted(1, [1, 2]))


def test_tokens_are_compared_by_sequence() -> None:
    recorded = outcomes([step(ONE, 1, 2), step(ONE, 3, end=FinishReason.LENGTH), step(TWO, 7)])
    same = outcomes([step(TWO, 7), step(ONE, 1), step(ONE, 2, 3, end=FinishReason.LENGTH)])
    other = outcomes([step(ONE, 1, 2), step(ONE, 4, end=FinishReason.LENGTH)])
    assert compare(recorded, same).is_same
    verdict = compare(recorded, other)
    assert (verdict.different, verdict.missing) == ([ONE], [TWO])
    assert f"different: 1 ({ONE:x})" in str(verdict)


def test_requests_are_compared_but_for_their_times() -> None:
    recorded = outcomes([(request(ONE, times=Times(5)), b"ids"), (request(TWO), b"ids")])
    replayed = outcomes([(request(ONE, times=Times(9)), b"ids"), (request(TWO), b"sdi")])
    verdict = compare(recorded, replayed)
    assert (verdict.num_same, verdict.different) == (1, [TWO])


def test_what_was_aborted_or_stopped_is_not_compared() -> None:
    sent = [request(ONE), request(TWO), request(request_id(0, 3)), Abort(ONE), StopSequence(TWO)]
    assert comparable(sent) == {request_id(0, 3)}
    assert comparable([step(ONE, end=FinishReason.ABORT)[0], step(TWO, 1)[0]]) == {TWO}


def test_tokenizer_responds_to_what_needs_no_engine() -> None:
    told = outcomes([(request(ONE), b""), frames(ONE, b"text"), frames(TWO, b"an error")])
    found = responses_of("tokenizer", told, {ONE, TWO})
    assert found.keys() == {(ONE, "request"), (TWO, "body")}
    assert responses_of("detokenizer", told, {ONE}).keys() == {(ONE, "body")}


def test_replayed_responses_are_timed_from_the_last_message() -> None:
    expected = outcomes([step(ONE, 1, end=FinishReason.LENGTH)])
    answers = ReplayedResponses(expected)
    answers.expect([ONE])
    answers.take(*step(ONE, 1))
    assert len(answers.latencies_s) == 1
    assert not answers.are_complete
    answers.take(*step(ONE, 2, end=FinishReason.LENGTH))
    assert len(answers.latencies_s) == 1, "nothing was sent in between"
    assert answers.are_complete
    assert not ReplayedResponses({}).are_complete, "without a record the end is unknown"
