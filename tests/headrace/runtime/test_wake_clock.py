"""A watcher is awake since its first look; a gap between looks starts anew."""

from headrace.runtime.wake_clock import GAP_S, WakeClock

SECOND = 10**9


def test_looks_that_follow_each_other_are_one_time_awake() -> None:
    awake, gap = WakeClock(), int(GAP_S * SECOND)
    times = [100 * SECOND + number * gap for number in range(4)]
    assert {awake.look(now) for now in times} == {times[0]}


def test_after_a_pause_it_has_just_woken_up() -> None:
    awake = WakeClock()
    awake.look(100 * SECOND)
    woken = int((100 + GAP_S) * SECOND) + 1
    assert awake.look(woken) == woken
    assert awake.look(woken + SECOND) == woken
