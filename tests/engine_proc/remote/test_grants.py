"""Grants of a remote engine: it has stopped before its sequences go on elsewhere."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine_proc.gateway.session import Session
from headrace.engine_proc.remote.grants import (
    ENDING_S,
    GRANT_S,
    SILENCE_S,
    ClockDifference,
    Grants,
)
from headrace.ipc.remote_messages import LEASE_S, Grant

NS = 10**9
TICK_S = 0.05
LONGEST_S = SILENCE_S + LEASE_S + ENDING_S + 2 * TICK_S


def grant_at(now: float, ahead: int | None = 0) -> Grant:
    return Grant(1, round(now * NS), ahead, 1, [1], {})


def test_grants_come_regularly_until_a_silence() -> None:
    grants = Grants(0.0)
    assert grants.are_due(0.0)
    grants.granted(0.0)
    assert not grants.are_due(GRANT_S / 2)
    assert grants.are_due(GRANT_S)
    grants.judge(SILENCE_S + TICK_S)
    assert not grants.are_due(SILENCE_S + TICK_S)


def test_an_answer_keeps_the_engine() -> None:
    grants = Grants(0.0)
    grants.granted(5.0)
    grants.answered(5.0)
    grants.answered(4.0)  # an older one, late
    grants.judge(5.0 + SILENCE_S)
    assert grants.are_due(5.0 + GRANT_S)
    assert not grants.have_run_out(60.0)


def test_a_lost_connection_waits_for_the_last_grant() -> None:
    grants = Grants(0.0)
    grants.granted(1.0)
    grants.lose()
    assert not grants.have_run_out(1.0 + LEASE_S)
    assert grants.have_run_out(1.0 + LEASE_S + 2 * ENDING_S)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=100, max_size=100),
    st.floats(0, LEASE_S),
)
def test_an_engine_stops_before_it_is_given_up(ways: list[tuple[bool, bool]], delay: float) -> None:
    """Whatever gets lost on either way, and however late grants come."""
    grants, session, ended_at = Grants(0.0), None, None
    coming: list[tuple[float, Grant]] = []
    for tick, (there, back) in enumerate(ways):
        now = tick * TICK_S
        if grants.have_run_out(now):
            ended_at = ended_at or now
            assert session is None or session.has_lapsed(round(now * NS))
            break
        if grants.are_due(now):
            grants.granted(now)
            if there:
                coming.append((now + delay, grant_at(now)))
        while coming and coming[0][0] <= now:
            _, grant = coming.pop(0)
            if session is None:
                session = Session(b"peer", grant, round(now * NS))
            elif not session.has_lapsed(round(now * NS)):
                session.renew(grant, round(now * NS))
            if back:
                grants.answered(grant.sent_at / NS)
        grants.judge(now)


def test_silence_ends_within_three_seconds() -> None:
    assert LONGEST_S < 3.0


def test_the_quickest_message_tells_how_clocks_differ() -> None:
    clocks = ClockDifference()
    assert clocks.ahead is None
    clocks.observe(1_000, 600, 1_200)
    clocks.observe(2_000, 1_990, 4_000)  # late on its way
    assert clocks.ahead == 500
