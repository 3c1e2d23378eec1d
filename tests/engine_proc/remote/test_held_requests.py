"""Requests held for an engine: they go on in order, and leave with their clients."""

from headrace.engine_proc.remote.held_requests import HeldRequests
from headrace.ipc.messages import (
    Abort,
    GeneratedTokens,
    GenerateRequest,
    Sampling,
    StopSequence,
    request_id,
)

FIRST, SECOND = request_id(0, 1), request_id(0, 2)


def held(*ids: int) -> HeldRequests:
    requests = HeldRequests()
    for id in ids:
        requests.take(GenerateRequest(id, 0, 4, Sampling(), [], b""), id.to_bytes(8, "little"))
    return requests


def left(requests: HeldRequests) -> list[int]:
    return [int.from_bytes(requests.pop()[1], "little") for _ in range(len(requests))]


def test_held_requests_go_on_in_their_order() -> None:
    assert left(held(SECOND, FIRST, FIRST + 1)) == [SECOND, FIRST, FIRST + 1]


def test_aborts_take_held_requests_along_and_are_not_kept() -> None:
    requests = held(FIRST, FIRST + 1, SECOND)
    requests.take(Abort(FIRST), b"")
    for unknown in range(100):
        requests.take(Abort(request_id(1, unknown)), b"")
    assert left(requests) == [SECOND]


def test_a_stopped_sequence_is_held_no_more() -> None:
    requests = held(FIRST, FIRST + 1)
    requests.take(StopSequence(FIRST), b"")
    assert left(requests) == [FIRST + 1]


def test_generated_tokens_go_before_the_requests_that_resume() -> None:
    requests = held(FIRST)
    requests.take(GeneratedTokens(b"", b""), SECOND.to_bytes(8, "little"))
    assert left(requests) == [SECOND, FIRST]
