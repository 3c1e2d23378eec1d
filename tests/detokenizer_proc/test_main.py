"""A detokenizer drops the state of a dead engine before it hears of the next one. A frontend that
is behind gets more text in fewer messages."""

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from byte_responses import ByteVocabulary, make_plan
from tiny_card import TINY_CARD

from headrace.board.board import Board, Seat, State
from headrace.board.fields import (
    CommonField,
    DetokenizerField,
    FrontendField,
    Seating,
)
from headrace.config.process_configs import DetokenizerConfig
from headrace.detokenizer_proc import main as main_module
from headrace.detokenizer_proc.main import Detokenizer, mark_start
from headrace.ipc.messages import GeneratedTokens, StepOutput, ToEngine, ToFrontend, request_id
from headrace.ipc.sockets import Inbox, Outbox, address
from headrace.runtime.process import Context

DEADLINE_MS = 120_000
OLD, NEW = request_id(0, 1), request_id(0, 2)


class Bench:
    """A detokenizer between an engine and a frontend that are played."""

    def __init__(self, run_dir: str) -> None:
        seats = [Seat(role, 0) for role in ("frontend", "tokenizer", "engine", "detokenizer")]
        self.board = Board.create(seats)
        self.engine_slot = self.board.slot("engine")
        self.start_engine()
        slot = self.board.slot("detokenizer")
        config = DetokenizerConfig(
            run_dir=run_dir, tokenizer_paths=(TINY_CARD.path,), num_frontends=1, stream_interval=1
        )
        self.engine: Inbox[ToEngine] = Inbox(address(run_dir, "engine"), ToEngine)
        self.frontend: Inbox[ToFrontend] = Inbox(address(run_dir, "frontend"), ToFrontend)
        self.detokenizer = Detokenizer(config, Context(slot.seat, self.board, slot, "info", 0))
        self.outbox = Outbox(address(run_dir, "detokenizer"))

    def start_engine(self) -> None:
        if self.engine_slot[CommonField.STATE] == State.READY:
            self.engine_slot.die()
        for state in (State.STARTING, State.READY):
            self.engine_slot.enter(state)

    def step(self, id: int, text: bytes, is_first: bool) -> None:
        """Tell of a step of one stream, and have it worked on."""
        started = {id: msgspec.msgpack.encode(make_plan(stream=True))} if is_first else {}
        output = StepOutput.of(started, [id], [len(text)], [None])
        self.outbox.send(output, array("I", list(text)).tobytes())
        self.detokenizer._inbox.wait(DEADLINE_MS)
        self.detokenizer.work()

    def tell(self, id: int, text: bytes, is_first: bool = True) -> bytes:
        """Tell of a stream's first tokens; return what the frontend gets."""
        self.step(id, text, is_first)
        received = self.frontend.receive(DEADLINE_MS)
        assert received is not None
        return bytes(received[1])

    def generated(self) -> tuple[list[int], bytes]:
        """Return what the next engine is told: sequences and their tokens."""
        received = self.engine.receive(DEADLINE_MS)
        assert received is not None
        assert isinstance(received[0], GeneratedTokens)
        return array("Q", received[0].ids).tolist(), bytes(memoryview(received[1]).cast("B")[::4])

    def close(self) -> None:
        self.detokenizer.close()
        for link in (self.engine, self.frontend, self.outbox):
            link.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(main_module, "load_vocabulary", lambda _path: ByteVocabulary())
    made = Bench(str(tmp_path))
    yield made
    made.close()


def test_what_a_dead_engine_had_is_handed_to_the_next(bench: Bench) -> None:
    assert b'"ab"' in bench.tell(OLD, b"ab")
    bench.engine_slot.die()
    bench.engine_slot.enter(State.STARTING)
    assert b'"c"' in bench.tell(NEW, b"c"), "it was on its way when its sender died"
    bench.detokenizer.work()
    ids, tokens = bench.generated()
    assert sorted(ids) == [OLD, NEW]
    assert sorted(tokens) == sorted(b"abc")
    assert not bench.detokenizer._responses


def test_what_an_unloaded_engine_had_is_kept_for_the_next(bench: Bench) -> None:
    bench.tell(OLD, b"ab")
    bench.board.seat(bench.engine_slot, Seating.VACANT)
    bench.engine_slot.die()
    bench.detokenizer.work()
    assert len(bench.detokenizer._responses[0]) == 1
    assert bench.engine.receive(0) is None
    bench.board.seat(bench.engine_slot, Seating.SEATED)
    bench.engine_slot.enter(State.STARTING)
    bench.detokenizer.work()
    assert bench.generated() == ([OLD], b"ab")
    assert not bench.detokenizer._responses


def test_news_of_the_next_engine_outlive_what_the_last_one_had(bench: Bench) -> None:
    bench.tell(OLD, b"ab")
    bench.start_engine()
    assert b'"c"' in bench.tell(NEW, b"c")
    assert bench.generated()[0] == [OLD]
    bench.detokenizer.work()
    assert len(bench.detokenizer._responses) == 1, "the new one is still there"


def test_slow_frontend_gets_more_text_in_fewer_messages(bench: Bench) -> None:
    assert b'"a"' in bench.tell(NEW, b"a")
    assert b'"b"' in bench.tell(NEW, b"b", is_first=False)
    for text in (b"c", b"d", b"e"):
        bench.step(NEW, text, is_first=False)
        assert bench.frontend.receive(0) is None, "it has two to handle"
    bench.board.slot("frontend").add(FrontendField.MESSAGES_TAKEN)
    bench.detokenizer.work()
    received = bench.frontend.receive(DEADLINE_MS)
    assert received is not None
    assert all(text in bytes(received[1]) for text in (b'"c"', b'"d"', b'"e"'))
    assert bench.frontend.receive(0) is None


def test_next_detokenizer_reports_the_response_of_the_last_death(bench: Bench) -> None:
    slot = bench.board.slot("detokenizer")
    slot[DetokenizerField.RESPONSE_AT_HAND] = OLD
    for state in (State.STARTING, State.READY):
        slot.enter(state)
    mark_start(slot)
    assert (
        slot[DetokenizerField.LAST_RESPONSE_AT_HAND],
        slot[DetokenizerField.RESPONSE_AT_HAND],
    ) == (
        OLD,
        0,
    )
    bench.tell(NEW, b"a")
    assert slot[DetokenizerField.LAST_RESPONSE_AT_HAND] == OLD, "until the next one dies"


def test_steps_that_pass_the_seat_by_are_not_in_the_backlog(bench: Bench) -> None:
    started = {NEW: msgspec.msgpack.encode(make_plan(stream=True))}
    steps = [(StepOutput.of(started, [NEW], [2], [None]), array("I", list(b"ab")).tobytes())]
    remote: Any = SimpleNamespace(
        polled=[],
        follow=lambda: None,
        receive=lambda: steps.pop() if steps else None,
        close=lambda: None,
    )
    bench.detokenizer._remote = remote
    bench.detokenizer.work()
    received = bench.frontend.receive(DEADLINE_MS)
    assert received is not None
    assert b'"ab"' in bytes(received[1])
    assert bench.detokenizer._backlog() == 0
    assert b'"c"' in bench.tell(OLD, b"c")
    assert bench.detokenizer._backlog() == -1, "`tell` counts none as sent"
