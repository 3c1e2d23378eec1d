"""Ids lead back to their request and frontend; messages survive their trip."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.ipc import schema_fingerprint as module
from headrace.ipc.messages import (
    COUNTER_BITS,
    ENDED,
    MAX_SEQUENCES,
    Abort,
    FinishReason,
    GenerateRequest,
    Head,
    HttpRequest,
    Image,
    Message,
    ResponseFrames,
    Sampling,
    StepOutput,
    StopSequence,
    Tensor,
    ToDetokenizer,
    ToEngine,
    ToFrontend,
    ToTokenizer,
    first_counter,
    frontend_of,
    request_id,
    request_of,
)
from headrace.ipc.schema_fingerprint import fingerprint
from headrace.ipc.token_logprobs import TokenLogprob
from headrace.ipc.worker_messages import (
    Encode,
    Encoded,
    FromVision,
    FromWorker,
    StepResult,
    ToVision,
    TowerReady,
    WorkerReady,
)


@given(
    frontend=st.integers(0, 255),
    counter=st.integers(0, 2 ** (COUNTER_BITS + 2)),
    sequence=st.integers(0, MAX_SEQUENCES - 1),
)
def test_a_sequence_leads_back_to_request_and_frontend(
    frontend: int, counter: int, sequence: int
) -> None:
    id = request_id(frontend, counter)
    assert 0 <= id < 2**64
    assert request_of(id + sequence) == id
    assert frontend_of(id + sequence) == frontend


def test_successive_requests_have_room_for_all_their_sequences() -> None:
    assert request_id(3, 8) - request_id(3, 7) == MAX_SEQUENCES


LARGEST = request_id(255, 2**COUNTER_BITS - 1) + MAX_SEQUENCES - 1
GENERATE = GenerateRequest(
    id=LARGEST,
    detokenizer=1,
    max_tokens=5,
    sampling=Sampling(
        temperature=0.5, seed=2**64 - 1, logit_bias={7: -100.0}, bad_words=[[1, 2]], logprobs=0
    ),
    stop_token_ids=[1, 2],
    plan=b"\x00\xff",
    images=[Image(b"0" * 16, 3, 66, 64, {"pixel_values": Tensor(1 << 40, 2, "f4", [1, 3, 8, 8])})],
)
EXAMPLES: list[tuple[Any, Message]] = [
    (ToTokenizer, HttpRequest(LARGEST, "POST", "/v1/é", 1.5)),
    (ToEngine, GENERATE),
    (ToEngine, Abort(LARGEST)),
    (ToEngine, StopSequence(LARGEST)),
    (ToDetokenizer, StepOutput.of({5: b"plan"}, [5, 6], [1, 0], [None, FinishReason.ABORT])),
    (
        ToDetokenizer,
        StepOutput.of(
            {},
            [5],
            [1],
            [None],
            cached={5: 32},
            logprobs={5: TokenLogprob(-0.5, 2, [(3, -0.25), (4, -0.5)]).pack()},
            embeddings={5: b"1234"},
        ),
    ),
    (ToFrontend, ResponseFrames.of({5: Head(200, "x")}, [5], [10], [True])),
    (FromWorker, StepResult(b"\x01\x02\x03\x04")),
    (FromWorker, WorkerReady(7, 32)),
    (ToVision, Encode([{"grid": Tensor(8, 1, "i8", [1, 3])}], [b"\x01\x02\x03\x04"])),
    (FromVision, Encoded([0], {1: "too small"})),
    (FromVision, TowerReady(1 << 20, 5)),
]


@pytest.mark.parametrize(("union", "message"), EXAMPLES)
def test_a_message_arrives_as_it_was_sent(union: Any, message: Message) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


def test_a_message_of_another_receiver_is_refused() -> None:
    encoded = msgspec.msgpack.encode(Abort(1))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=StepOutput)


def test_messages_do_not_change() -> None:
    with pytest.raises(AttributeError):
        Abort(1).request = 2  # type: ignore[misc]


def test_the_fingerprint_changes_with_any_message(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint()
    assert fingerprint() == before

    class Changed(Message, tag="stop", frozen=True):
        id: int
        why: str = ""

    monkeypatch.setattr(module, "ToEngine", GenerateRequest | Abort | Changed)
    assert fingerprint() != before


def test_a_head_comes_with_a_requests_first_entry_alone() -> None:
    head = Head(200, "text/event-stream")
    one, other = request_id(0, 1), request_id(0, 2)
    columns = [one + 1, other, one], [2, 1, 3], [False, False, True]
    frames = ResponseFrames.of({one: head}, *columns, [5, 0, 7 | ENDED])
    entries = [(id, head, bytes(data), *more) for id, head, data, *more in frames.split(b"abcdef")]
    assert entries == [
        (one + 1, head, b"ab", False, 5),
        (other, None, b"c", False, 0),
        (one, None, b"def", True, 7 | ENDED),
    ]
    assert frames.heads == {one: head}


def test_outputs_without_tokens_need_no_counts() -> None:
    frames = ResponseFrames.of({}, [1, 2], [1, 1], [True, True])
    assert [told for *_, told in frames.split(b"ab")] == [0, 0]


def test_next_frontend_in_a_seat_draws_other_ids() -> None:
    first, second = (request_id(3, first_counter(start) + 1) for start in (1, 2))
    assert first != second
    assert frontend_of(first) == frontend_of(second) == 3
    assert first_counter(257) == first_counter(1)
