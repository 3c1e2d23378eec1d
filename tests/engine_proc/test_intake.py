"""Requests are taken or refused whole; what is aborted first is dropped when it comes."""

import logging

import pytest

from headrace.engine_proc.intake import LAPSE_S, MAX_GONE, Intake, Verdict
from headrace.messages import request_id

FIRST, SECOND = request_id(0, 1), request_id(0, 2)


def test_a_request_is_taken_whole_where_its_first_sequence_is() -> None:
    intake = Intake()
    assert intake.judge(FIRST, is_full=False) is Verdict.TAKEN
    assert intake.judge(FIRST + 1, is_full=True) is Verdict.TAKEN


def test_a_request_is_refused_whole_and_once() -> None:
    intake = Intake()
    assert intake.judge(FIRST, is_full=True) is Verdict.REFUSED
    assert intake.judge(FIRST + 1, is_full=False) is Verdict.DROPPED
    assert intake.judge(SECOND, is_full=False) is Verdict.TAKEN


def test_an_abort_that_overtakes_its_request_still_works() -> None:
    intake = Intake()
    intake.drop(FIRST)
    assert intake.judge(FIRST, is_full=False) is Verdict.DROPPED
    assert intake.judge(FIRST + 1, is_full=False) is Verdict.DROPPED


def test_aborts_of_what_never_comes_are_forgotten_in_the_end() -> None:
    intake = Intake()
    for counter in range(MAX_GONE + 1):
        intake.drop(request_id(0, counter))
    assert intake.judge(request_id(0, 0), is_full=False) is Verdict.TAKEN
    assert intake.judge(request_id(0, 1), is_full=False) is Verdict.DROPPED


def test_what_nobody_renews_lapses(caplog: pytest.LogCaptureFixture) -> None:
    intake = Intake(lease_s=10)
    assert intake.lapsed([FIRST, SECOND], now=0) == []
    intake.renew([SECOND], now=9)
    with caplog.at_level(logging.WARNING):
        assert intake.lapsed([FIRST, SECOND], now=11) == [FIRST]
    assert f"{FIRST:x}" in caplog.text


def test_leases_are_looked_at_now_and_then() -> None:
    intake = Intake(lease_s=LAPSE_S / 4)
    assert intake.lapsed([FIRST], now=0) == []
    assert intake.lapsed([FIRST], now=LAPSE_S / 2) == [], "it has lapsed, but nobody looks"
    assert intake.lapsed([FIRST], now=LAPSE_S) == [FIRST]
