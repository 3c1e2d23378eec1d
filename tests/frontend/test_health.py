"""What is told of the server's health, and of each process."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.board.board import MESSAGES_SENT, Board, Seat, State
from headrace.board.fields import (
    CommonField,
    EngineField,
    FrontendField,
    Seating,
    TokenizerField,
    WorkerField,
)
from headrace.frontend.app import App
from headrace.frontend.health import PATHS, health_of
from headrace.frontend.http.request_head import RequestHead
from headrace.routes import HEALTH, READY, STARTUP
from headrace.runtime.wake_clock import WakeClock

SEATS = [Seat(role, 0) for role in ("frontend", "tokenizer", "engine", "worker", "detokenizer")]


FOR_LONG = -(10**10)  # since when the asking process has been awake


def make_board() -> Board:
    """A board on which all serve."""
    board = Board.create(SEATS)
    for slot in board.slots:
        slot.enter(State.STARTING)
        slot.enter(State.READY)
        slot[CommonField.HEARTBEAT_NS] = 10**9
        slot[CommonField.PROGRESS] = 1000
    return board


def ask(board: Board, path: str, is_draining: bool = False) -> tuple[int, list[str]]:
    found = health_of(board, path, is_draining, 2 * 10**9, FOR_LONG)
    return found.status, json.loads(found.body)["reasons"]


@pytest.mark.parametrize("path", sorted(PATHS))
def test_all_is_well_where_all_serve(path: str) -> None:
    assert ask(make_board(), path) == (200, [])


def test_server_is_ready_while_one_replica_is_whole() -> None:
    board = Board.create([*SEATS, Seat("engine", 1), Seat("worker", 1)])
    for slot in board.slots:
        slot.enter(State.READY)
        slot[CommonField.HEARTBEAT_NS] = 10**9
    board.slot("worker", 1)[WorkerField.ENGINE] = 1
    board.slot("worker", 1)[CommonField.STATE] = State.DEAD
    assert ask(board, READY) == (200, [])
    assert ask(board, HEALTH) == (503, ["worker 1 is dead"])
    board.slot("engine", 0)[CommonField.STATE] = State.STARTING
    assert ask(board, READY) == (503, ["engine 0 is starting", "worker 1 is dead"])


def test_a_whole_engine_is_ready_without_placement() -> None:
    board = Board.create([*SEATS, Seat("engine", 1), Seat("placement", 0)])
    for slot in board.slots:
        slot.enter(State.READY)
        slot[CommonField.HEARTBEAT_NS] = 10**9
    board.slot("engine", 1)[CommonField.STATE] = State.STARTING
    board.slot("placement")[CommonField.STATE] = State.DEAD
    assert ask(board, READY) == (200, [])
    assert ask(board, HEALTH) == (503, ["engine 1 is starting", "placement 0 is dead"])
    board.slot("engine", 0)[CommonField.STATE] = State.DEAD
    reasons = ["engine 0 is dead", "engine 1 is starting", "placement 0 is dead"]
    assert ask(board, READY) == (503, reasons)


def test_a_vacant_seat_is_no_whole_replica() -> None:
    board = Board.create([*SEATS, Seat("engine", 1), Seat("worker", 1)])
    board.slot("engine", 1)[EngineField.SEATING] = Seating.VACANT
    board.slot("worker", 1)[WorkerField.ENGINE] = 1
    for seat in SEATS:
        board.slot(seat.role).enter(State.READY)
        board.slot(seat.role)[CommonField.HEARTBEAT_NS] = 10**9
    assert ask(board, READY) == (200, [])
    board.slot("engine")[CommonField.STATE] = State.DEAD
    assert ask(board, READY) == (503, ["engine 0 is dead"])


def test_server_is_not_ready_without_one_of_its_models() -> None:
    board = Board.create([*SEATS, Seat("engine", 1), Seat("worker", 1)])
    for slot in board.slots:
        slot.enter(State.READY)
        slot[CommonField.HEARTBEAT_NS] = 10**9
    board.slot("worker", 1)[WorkerField.ENGINE] = board.slot("engine", 1)[EngineField.MODEL] = 1
    board.slot("worker", 1)[CommonField.STATE] = State.DEAD
    assert ask(board, READY) == (503, ["worker 1 is dead"])


def test_each_process_is_reported() -> None:
    board = make_board()
    board.slot("engine")[EngineField.WAITING] = 7
    board.slot("engine")[EngineField.MODEL] = 1
    board.slot("engine")[EngineField.STEPPED_NS] = 5 * 10**8
    board.slot("engine")[MESSAGES_SENT] = 3
    board.slot("detokenizer")[MESSAGES_SENT] = 2
    board.slot("frontend")[FrontendField.LAG_NS] = 12 * 10**6
    board.slot("frontend")[FrontendField.FORWARDED_BYTES] = 900
    board.slot("tokenizer")[TokenizerField.HANDLED_BYTES] = 200
    board.slot("worker").enter(State.STARTING)
    told = json.loads(health_of(board, HEALTH, False, 2 * 10**9).body)
    alike = {"state": "ready", "silent_s": 1.0, "restarts": 0}
    frontend = {"open_requests": 0, "connections": 0, "queued_messages": 2, "lag_s": 0.012}
    assert told["processes"] == [
        {"process": "frontend 0", **alike, **frontend},
        {"process": "tokenizer 0", **alike, "queued_bytes": 700},
        {
            "process": "engine 0",
            **alike,
            "model": 1,
            "running": 0,
            "waiting": 7,
            "steps": 0,
            "last_step_s": 1.5,
        },
        {
            "process": "worker 0",
            "state": "starting",
            "silent_s": 0.0,
            "restarts": 1,
            "engine": 0,
            "steps": 0,
        },
        {"process": "detokenizer 0", **alike, "open_replies": 0, "queued_steps": 3},
    ]


def test_silent_process_is_named() -> None:
    found = health_of(make_board(), HEALTH, False, 6 * 10**9)
    assert found.status == 503
    assert json.loads(found.body)["reasons"] == [
        f"{seat} has been silent for 5 s" for seat in SEATS
    ]


def test_a_step_that_does_not_end_is_no_good_health() -> None:
    board = make_board()
    board.slot("engine")[EngineField.STEP_DUE_NS] = 2 * 10**9 - 1
    assert ask(board, HEALTH) == (503, ["engine 0 waits for a step that has taken far too long"])


def test_health_after_a_pause_waits_for_heartbeats() -> None:
    board = make_board()
    board.slot("engine")[EngineField.STEP_DUE_NS] = 2 * 10**9
    for at, status in ((60, 200), (63, 200), (64, 503)):
        found = health_of(board, HEALTH, False, at * 10**9, since_ns=60 * 10**9)
        assert found.status == status
    for slot in board.slots:
        slot[CommonField.HEARTBEAT_NS] = 64 * 10**9
    assert health_of(board, HEALTH, False, 64 * 10**9, 60 * 10**9).status == 200
    assert health_of(board, HEALTH, False, 65 * 10**9, 60 * 10**9).status == 503, "the step"


def test_frontend_that_slept_reports_no_unhealthy_process(monkeypatch: pytest.MonkeyPatch) -> None:
    board, statuses = make_board(), []
    others: Any = SimpleNamespace(is_closed=False)
    app = App(board, WakeClock(), others, others, others)
    request: Any = SimpleNamespace(
        path=HEALTH, method="GET", version="1.1", head=RequestHead.of([(b"host", b"x")])
    )
    request.respond = lambda status, head, body: statuses.append(status)
    for at in (2, 3600, 3602, 3604, 3606):
        monkeypatch.setattr(time, "monotonic_ns", lambda at=at: at * 10**9)
        app(request)
    assert statuses == [200, 200, 200, 503, 503]


def test_a_server_that_stops_is_alive_but_not_ready() -> None:
    board = make_board()
    assert ask(board, HEALTH, is_draining=True) == (200, [])
    assert ask(board, READY, is_draining=True)[0] == 503


def test_start_up_is_over_once_and_for_all() -> None:
    board = make_board()
    worker = board.slot("worker")
    worker[CommonField.STARTS], worker[CommonField.STATE] = 1, State.STARTING
    worker[CommonField.PROGRESS] = 420
    assert ask(board, STARTUP) == (503, ["worker 0 is starting"])
    assert json.loads(health_of(board, STARTUP, False, 2 * 10**9).body)["loaded"] == 0.42
    worker.enter(State.READY)
    assert ask(board, STARTUP) == (200, [])
    worker.enter(State.STARTING)
    assert ask(board, STARTUP) == (200, [])
    assert ask(board, HEALTH) == (503, ["worker 0 is starting"])


def test_engines_that_come_later_are_no_part_of_the_start() -> None:
    board = Board.create([*SEATS, Seat("engine", 1), Seat("worker", 1)])
    board.slot("engine", 1)[EngineField.IS_SPARE] = 1
    board.slot("worker", 1)[WorkerField.ENGINE] = 1
    for slot in board.slots:
        slot.enter(State.STARTING)
        if slot.seat in SEATS:
            slot.enter(State.READY)
        slot[CommonField.HEARTBEAT_NS] = 10**9
    assert ask(board, STARTUP) == (200, [])
    assert ask(board, HEALTH)[0] == 503
