"""Requests are taken or refused whole; what is aborted first is dropped when it comes."""

import logging

import pytest

from headrace.engine_proc.request_io.intake import LAPSE_S, Intake, IntakeDecision
from headrace.ipc.aborted_ids import MAX_ABORTED
from headrace.ipc.messages import first_counter, request_id

FIRST, SECOND = request_id(0, 1), request_id(0, 2)


def test_a_request_is_taken_whole_where_its_first_sequence_is() -> None:
    intake = Intake()
    assert intake.judge(FIRST, is_full=False) is IntakeDecision.TAKEN
    assert intake.judge(FIRST + 1, is_full=True) is IntakeDecision.TAKEN


def test_a_request_is_refused_whole_and_once() -> None:
    intake = Intake()
    assert intake.judge(FIRST, is_full=True) is IntakeDecision.REFUSED
    assert intake.judge(FIRST + 1, is_full=False) is IntakeDecision.DROPPED
    assert intake.judge(SECOND, is_full=False) is IntakeDecision.TAKEN


def test_an_abort_that_overtakes_its_request_still_works() -> None:
    intake = Intake()
    intake.drop(FIRST)
    assert intake.judge(FIRST, is_full=False) is IntakeDecision.DROPPED
    assert intake.judge(FIRST + 1, is_full=False) is IntakeDecision.DROPPED


def test_aborts_of_what_never_comes_are_forgotten_in_the_end() -> None:
    intake = Intake()
    for counter in range(MAX_ABORTED + 1):
        intake.drop(request_id(0, counter))
    assert intake.judge(request_id(0, 0), is_full=False) is IntakeDecision.TAKEN
    assert intake.judge(request_id(0, 1), is_full=False) is IntakeDecision.DROPPED


def test_request_without_renewal_lapses(caplog: pytest.LogCaptureFixture) -> None:
    intake = Intake(lease_s=10)
    assert intake.expired([FIRST, SECOND], now=0) == []
    intake.renew([SECOND], now=9)
    with caplog.at_level(logging.WARNING):
        assert intake.expired([FIRST, SECOND], now=11) == []
        assert intake.expired([FIRST, SECOND], now=12) == [FIRST]
    assert f"{FIRST:x}" in caplog.text


def test_leases_are_looked_at_now_and_then() -> None:
    intake = Intake(lease_s=LAPSE_S / 4)
    assert intake.expired([FIRST], now=0) == []
    assert intake.expired([FIRST], now=LAPSE_S) == []
    assert intake.expired([FIRST], now=1.5 * LAPSE_S) == [], "it has expired, but is not checked"
    assert intake.expired([FIRST], now=2 * LAPSE_S) == [FIRST]


def test_requests_of_a_replaced_frontend_are_aborted_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    intake = Intake()
    old, new, other = (
        request_id(frontend, first_counter(start) + 1)
        for frontend, start in [(0, 1), (0, 2), (1, 1)]
    )
    assert intake.expired([old, new, other], 0.0, starts=[2, 1]) == [old]
    assert intake.expired([new, other], LAPSE_S, starts=[2 + 256, 1 + 256]) == []
    assert not caplog.records


def test_a_ring_without_frontends_has_no_orphans() -> None:
    assert Intake().expired([FIRST], 0.0, starts=[0]) == []
