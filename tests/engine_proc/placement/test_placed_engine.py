"""When an engine is started on some node, watched, and started anew."""

import logging

import pytest

from headrace.engine_proc.placement.placed_engine import (
    LACK_S,
    LISTEN_S,
    RETRY_S,
    ROOM_S,
    EngineEnded,
    EngineStarted,
    NodeUnreachable,
    Outcome,
    PlacedEngine,
)
from headrace.supervision.restart_backoff import DELAYS_S, PATIENT_S

NAME = "engine 3"
WHERE = "tcp://node:1"


class FakeCluster:
    """Notes what it is asked; a test answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: Outcome | None = None
        self.lack = ""

    def start(self, name: str) -> None:
        self._note("start", name)

    def watch(self, name: str) -> None:
        self._note("watch", name)

    def end(self, name: str) -> None:
        self._note("end", name)

    def leave(self, name: str) -> None:
        self._note("leave", name)

    def poll(self, name: str) -> Outcome | None:
        assert name == NAME
        answer, self.answer = self.answer, None
        return answer

    def shortage(self, name: str) -> str:
        assert name == NAME
        return self.lack

    def _note(self, what: str, name: str) -> None:
        assert name == NAME
        self.asked.append(what)


class Bench:
    """An engine in a fake cluster, at a time of the test's."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.published: list[str | None] = []
        self.serves = False
        self.engine = PlacedEngine(NAME, self.cluster, self.published.append, lambda: self.serves)
        self.now = 0.0
        self.engine.look(self.now)

    def answer(self, outcome: Outcome) -> None:
        """Have the cluster answer, and the engine look."""
        self.cluster.answer = outcome
        self.engine.look(self.now)

    def wait(self, seconds: float) -> list[str]:
        """Let time pass; return what the cluster is asked then."""
        num_before = len(self.cluster.asked)
        self.now += seconds
        self.engine.look(self.now)
        return self.cluster.asked[num_before:]


def test_an_engine_is_started_published_and_watched() -> None:
    bench = Bench()
    assert not bench.engine.is_placed
    bench.answer(EngineStarted(WHERE))
    assert bench.cluster.asked == ["start", "watch"]
    assert bench.published == [WHERE]
    assert bench.engine.is_placed
    assert not bench.wait(1000.0)


def test_an_engine_that_ends_is_withdrawn_and_started_anew() -> None:
    bench = Bench()
    bench.answer(EngineStarted(WHERE))
    bench.answer(EngineEnded("on node was killed"))
    assert bench.cluster.asked[2:] == ["end"]
    assert bench.published == [WHERE, None]
    assert not bench.engine.is_placed
    assert bench.wait(DELAYS_S[0]) == ["start"]


def test_engines_that_cannot_start_are_started_ever_later() -> None:
    bench = Bench()
    for delay_s in (*DELAYS_S, PATIENT_S, PATIENT_S):
        bench.answer(EngineEnded("no such model"))
        assert not delay_s or not bench.wait(delay_s / 2)
        assert bench.wait(delay_s) == ["start"]


def test_an_engine_that_has_served_is_replaced_at_once() -> None:
    bench = Bench()
    for _ in range(len(DELAYS_S) + 1):
        bench.answer(EngineStarted(WHERE))
        bench.serves = True
        bench.wait(1.0)
        bench.serves = False
        bench.answer(EngineEnded("on node was killed"))
        assert bench.wait(DELAYS_S[0]) == ["start"]


def test_an_engine_that_never_serves_is_replaced_ever_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    for delay_s in (*DELAYS_S, PATIENT_S, PATIENT_S):
        bench.answer(EngineStarted(WHERE))
        bench.wait(1000.0)  # it loads
        bench.answer(EngineEnded("on node was killed"))
        assert not delay_s or not bench.wait(delay_s / 2)
        assert bench.wait(delay_s) == ["start"]
    assert len(caplog.records) == 1


def test_a_node_that_is_unreachable_keeps_its_engine() -> None:
    bench = Bench()
    bench.answer(EngineStarted(WHERE))
    bench.answer(NodeUnreachable())
    assert bench.published == [WHERE]
    assert not bench.wait(RETRY_S / 2)
    assert bench.wait(RETRY_S) == ["watch"]


def test_a_start_that_is_unreachable_is_given_up() -> None:
    bench = Bench()
    bench.answer(NodeUnreachable())
    assert bench.cluster.asked == ["start", "end"]


def test_each_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            bench.answer(EngineEnded("no such model"))
            bench.wait(PATIENT_S)
        assert [record.message for record in caplog.records] == [
            f"{NAME} no such model; starting another"
        ]


def test_a_lack_of_room_is_logged_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.WARNING):
        bench.wait(ROOM_S)
        assert not caplog.records, "it has room, and starts"
        bench.cluster.lack = "waits for 2 CPUs"
        bench.wait(1.0)
        assert not caplog.records, "the cluster is not asked at each look"
        bench.wait(LACK_S)
        bench.cluster.lack = "waits for 2 CPUs, of which others are free"
        bench.wait(LACK_S)
        assert [record.message for record in caplog.records] == [f"{NAME} waits for 2 CPUs"]


def test_a_start_that_does_not_end_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.cluster.lack = "waits for 2 CPUs"
    bench.wait(LISTEN_S)
    bench.cluster.lack = ""
    bench.wait(LISTEN_S)
    assert bench.cluster.asked == ["start"], "it has only just got its room"
    assert bench.wait(LISTEN_S) == ["end"]
    assert "does not listen there after 1800 s; starting another" in caplog.text


def test_an_engine_that_is_not_wanted_gives_up_its_room() -> None:
    bench = Bench()
    bench.answer(EngineStarted(WHERE))
    for _ in range(2):
        bench.engine.leave()
    assert bench.cluster.asked == ["start", "watch", "leave"]
    assert bench.published[-1] is None
    assert not bench.engine.is_placed
    assert bench.wait(0) == ["start"], "it is wanted again"


def test_an_engine_that_waits_for_room_gives_it_up() -> None:
    bench = Bench()
    bench.engine.leave()
    assert bench.cluster.asked == ["start", "leave"]


def test_an_engine_that_never_was_wanted_asks_for_nothing() -> None:
    cluster, published = FakeCluster(), list[str | None]()
    PlacedEngine(NAME, cluster, published.append, lambda: False).leave()
    assert (cluster.asked, published) == ([], [])
