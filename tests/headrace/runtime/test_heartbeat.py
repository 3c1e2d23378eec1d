"""Heartbeats go on during long work only while there is progress."""

import time
from itertools import chain, repeat

import pytest
from servers import wait_until

from headrace.board.board import Board, Field, Seat
from headrace.runtime.heartbeat import MAX_WORK_S, Heartbeat


def test_a_heart_stops_when_a_piece_of_work_takes_too_long() -> None:
    now = 0.0
    slot = Board.create([Seat("worker", 0)]).slot("worker")
    heartbeat = Heartbeat(slot, lambda: now)
    for began_at in (0.0, 5000.0):  # between pieces it may wait for as long as it likes
        now = began_at
        heartbeat.begin()
        now = began_at + MAX_WORK_S
        before = time.monotonic_ns()
        assert heartbeat.beat()
        assert slot[Field.HEARTBEAT_NS] >= before
        heartbeat.end()
    heartbeat.begin()
    now += MAX_WORK_S + 1
    last = slot[Field.HEARTBEAT_NS]
    assert not heartbeat.beat()
    assert slot[Field.HEARTBEAT_NS] == last


def test_progress_keeps_long_work_alive() -> None:
    now, loaded = 0.0, 0
    heartbeat = Heartbeat(Board.create([Seat("worker", 0)]).slot("worker"), lambda: now)
    heartbeat.begin(lambda: loaded)
    for _ in range(3):
        now += MAX_WORK_S
        loaded += 1
        assert heartbeat.beat()
    now += MAX_WORK_S
    assert heartbeat.beat()
    now += 1
    assert not heartbeat.beat()
    loaded += 1
    heartbeat.end()
    now += 1000
    assert heartbeat.beat()


def test_a_heart_that_stops_says_so(caplog: pytest.LogCaptureFixture) -> None:
    times = chain((0.0,), repeat(MAX_WORK_S + 1))
    heartbeat = Heartbeat(Board.create([Seat("worker", 0)]).slot("worker"), lambda: next(times))
    heartbeat.begin()
    heartbeat.start()
    wait_until(lambda: "its heart stops" in caplog.text, "it says so")
