"""Admission: load limits, and Retry-After of rejected requests."""

import pytest

from headrace.frontend.admission.admission import (
    LONGEST_S,
    UNKNOWN_S,
    Admission,
    AdmissionLimits,
    DrainRate,
    Load,
)

LIMITS = AdmissionLimits(num_waiting_tokens=1000, num_body_bytes=5000)
IDLE = Load(0, 0, 0, 100)


def rate(per_s: float) -> DrainRate:
    made = DrainRate()
    for second in range(100):
        made.observe(round(per_s * second), second)
    return made


@pytest.mark.parametrize(
    ("load", "length", "why"),
    [
        (IDLE, 10**9, None),  # alone, any body is taken
        (Load(99, 999, 4000, 100), 1000, None),
        (Load(100, 0, 0, 100), 0, "--max-num-queued"),
        (Load(0, 1000, 0, 100), 0, "--max-queued-tokens"),
        (Load(0, 0, 4000, 100), 1001, "bodies of 4000 bytes"),
    ],
)
def test_limits_are_kept(load: Load, length: int, why: str | None) -> None:
    rejection = Admission(LIMITS).refuse(load, length)
    assert (rejection is None) == (why is None)
    if rejection is not None:
        assert why is not None and why in rejection.message
        assert rejection.status == 429


def test_zero_is_no_limit() -> None:
    assert Admission(AdmissionLimits(0, 0)).refuse(Load(10**6, 10**9, 10**12, 0), 10**12) is None


def test_retry_after_is_when_the_queue_will_be_half_empty() -> None:
    admission = Admission(LIMITS)
    admission.requests, admission.tokens = rate(10.5), rate(260)
    rejection = admission.refuse(Load(100, 0, 0, 100), 0)
    assert rejection is not None and rejection.retry_after_s == 5
    rejection = admission.refuse(Load(0, 1500, 0, 100), 0)
    assert rejection is not None and rejection.retry_after_s == 4


def test_rates_follow_the_counter() -> None:
    made = rate(50)
    assert made.per_s == pytest.approx(50, rel=0.01)
    for second in range(100, 200):
        made.observe(50 * 99, second)
    assert made.per_s == pytest.approx(0, abs=0.1)


def test_waiting_has_limits() -> None:
    assert DrainRate().seconds_for(10) == UNKNOWN_S
    assert rate(1).seconds_for(10**6) == LONGEST_S
    assert rate(1000).seconds_for(1) == 1


def test_looking_twice_at_once_is_looking_once() -> None:
    made = rate(10)
    before = made.per_s
    made.observe(10**9, 99)
    assert made.per_s == before
