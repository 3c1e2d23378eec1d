"""Sessions of a gateway: the requests that the engine may have, and how long it may have them."""

import pytest

from headrace.engine_proc.gateway.session import LEASE_NS, Session
from headrace.ipc.messages import (
    Abort,
    FinishReason,
    GenerateRequest,
    Sampling,
    StepOutput,
    StopSequence,
    request_id,
)
from headrace.ipc.remote_messages import Grant

FIRST, SECOND = request_id(0, 1), request_id(0, 2)


def grant(sent_at: int = 0, ahead: int | None = 0) -> Grant:
    return Grant(1, sent_at, ahead, 1, [1], {})


def generate(id: int) -> GenerateRequest:
    return GenerateRequest(id, 0, 4, Sampling(), [], b"")


def test_sequences_are_open_until_they_end() -> None:
    session = Session(b"peer", grant(), 0)
    for id in (FIRST, FIRST + 1, SECOND):
        session.sent(generate(id), 12)
    assert session.num_tokens == 9
    assert session.requests == {FIRST, SECOND}
    session.came(StepOutput.of({}, [FIRST, SECOND], [1, 1], [FinishReason.STOP, None]))
    assert session.requests == {FIRST, SECOND}
    session.sent(StopSequence(FIRST + 1), 0)
    assert session.requests == {SECOND}
    session.sent(Abort(SECOND), 0)
    assert not session.requests


@pytest.mark.parametrize("end", [FinishReason.REFUSED, FinishReason.ABORT])
def test_an_end_of_a_request_closes_all_its_sequences(end: FinishReason) -> None:
    session = Session(b"peer", grant(), 0)
    for id in (FIRST, FIRST + 1, SECOND):
        session.sent(generate(id), 12)
    session.came(StepOutput.of({}, [FIRST], [0], [end]))
    assert session.requests == {SECOND}


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_sequence_after_the_end_of_its_request_is_not_open(is_refused: bool) -> None:
    """An abort may overtake its request. The engine drops that without output."""
    session = Session(b"seat", grant(), 0)
    if is_refused:
        session.sent(generate(FIRST), 12)
        session.came(StepOutput.of({}, [FIRST], [0], [FinishReason.REFUSED]))
    else:
        session.sent(Abort(FIRST), 0)
    session.sent(generate(FIRST + 1), 12)
    assert not session.requests
    assert session.num_tokens == 3 * (1 + is_refused), "the engine takes them"


def test_a_grant_counts_from_when_it_was_sent() -> None:
    ahead = 7 * LEASE_NS  # the server's clock
    session = Session(b"peer", grant(ahead, None), 0)
    session.renew(grant(ahead + 100, ahead), LEASE_NS // 2)
    assert not session.has_lapsed(LEASE_NS + 100)
    assert session.has_lapsed(LEASE_NS + 101)


def test_steps_go_to_a_detokenizer_once_no_sequence_is_open() -> None:
    session = Session(b"seat", grant(), 0)
    session.sent(generate(FIRST), 12)
    session.attach(0, b"detokenizer")
    session.sent(generate(SECOND), 12)
    assert session.outlet(0) == b"seat"
    session.came(StepOutput.of({}, [FIRST, SECOND], [1, 1], 2 * [FinishReason.STOP]))
    assert session.outlet(0) == b"seat", "the step itself"
    session.sent(generate(FIRST + 1), 12)
    assert (session.outlet(0), session.outlet(1)) == (b"detokenizer", b"seat")


def test_an_aborted_end_goes_the_way_of_its_steps() -> None:
    session = Session(b"seat", grant(), 0)
    session.sent(generate(FIRST), 12)
    session.attach(0, b"detokenizer")
    session.sent(Abort(FIRST), 0)
    session.sent(generate(SECOND), 12)
    assert session.outlet(0) == b"seat"
