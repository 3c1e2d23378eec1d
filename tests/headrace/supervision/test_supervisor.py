"""The parts of the supervisor that start no process."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import EngineField, Seating
from headrace.config.config import ServerConfig
from headrace.exit_status import ExitStatus
from headrace.runtime.placed_address import PlacedAddress
from headrace.runtime.roles import ROLES, title
from headrace.supervision import engine_seats
from headrace.supervision.engine_seats import EngineSeats
from headrace.supervision.load_policy import FIRST_RETRY_S, LoadPolicy
from headrace.supervision.model_loads import ModelLoads
from headrace.supervision.renewals import Renewals
from headrace.supervision.seated_process import SeatedProcess
from headrace.supervision.seats import seats_of
from headrace.supervision.supervisor import ChildDied, Supervisor


def test_there_is_a_seat_per_process() -> None:
    config = ServerConfig(frontend_procs=2, tokenizer_procs=3, detokenizer_procs=1)
    seats = seats_of(config)
    assert len(seats) == len(set(seats)) == 2 + (3 + 2) + 1 + 1 + 1
    assert [s for s in seats if s.role == "tokenizer"] == [Seat("tokenizer", i) for i in range(5)]
    asked_for = {"vision", "kv_store", "fetcher", "telemetry", "placement", "stage"}
    assert {seat.role for seat in seats} == set(ROLES) - asked_for


def test_telemetry_has_a_seat_where_it_is_asked_for() -> None:
    seat = Seat("telemetry", 0)
    traced = ServerConfig(otlp_traces_endpoint="http://localhost:4318")
    for config in (ServerConfig(access_log=True), traced):
        assert seat in seats_of(config)
        assert seat not in seats_of(config, handles_gets=False), "without frontends"


def test_embedded_ring_has_no_process_for_gets() -> None:
    config = ServerConfig(tokenizer_procs=3)
    assert set(seats_of(config)) - set(seats_of(config, handles_gets=False)) == {
        Seat("tokenizer", 4)
    }


def test_image_models_get_tokenizers_that_prepare_images() -> None:
    config = ServerConfig(tokenizer_procs=2, preprocess_procs=3)
    with_images = seats_of(config, takes_images=True)
    assert [seat for seat in with_images if seat not in seats_of(config)] == [
        *(Seat("tokenizer", i) for i in (4, 5, 6)),
        Seat("vision", 0),
    ]
    fetching = ServerConfig(allowed_media_domains=("example.com",))
    assert Seat("fetcher", 0) in seats_of(fetching, takes_images=True)
    assert Seat("fetcher", 0) not in seats_of(fetching)
    mock = ServerConfig(engine="mock")
    assert {seat.role for seat in seats_of(mock, takes_images=True)}.isdisjoint(
        ("vision", "worker")
    )


def test_a_title_has_a_number_where_there_can_be_several() -> None:
    assert title("frontend", 1) == "headrace: frontend 1"
    assert title("engine", 0) == "headrace: engine"


def test_a_dead_child_is_named_with_how_it_died() -> None:
    killed = ChildDied(Seat("worker", 0), -signal.SIGKILL)
    assert str(killed) == "worker 0 was killed by SIGKILL"
    ended = ChildDied(Seat("engine", 0), 3, "no memory")
    assert str(ended) == "engine 0 exited with 3 (no memory)"
    assert (killed.exit_status, ended.exit_status) == (ExitStatus.HOPELESS, ExitStatus.BAD_MODEL)


class Rig:
    """A supervisor of two engines whose processes are played."""

    def __init__(self) -> None:
        self.board = Board.create([Seat("engine", 0), Seat("engine", 1)])
        for slot in self.board.slots:
            slot.enter(State.STARTING)
            slot.enter(State.READY)
        process: Any = SimpleNamespace(send_signal=lambda _signal: None)
        self.children = [SeatedProcess(slot.seat, process, -1) for slot in self.board.slots]
        self.seats = EngineSeats(self.board, 60)
        self.supervisor: Any = Supervisor.__new__(Supervisor)
        self.supervisor.board = self.board
        self.supervisor._engine_seats = self.seats
        self.supervisor._children = list(self.children)
        self.supervisor._files = SimpleNamespace(clear=lambda _engine: None)
        self.supervisor._renewals = Renewals(self.board, self.seats)


def test_an_engine_that_died_and_leaves_has_no_successor() -> None:
    rig = Rig()
    rig.seats.end(1, -signal.SIGKILL)
    rig.children[1].start_at = 0.0
    rig.seats.resize(0, 1)
    rig.supervisor._restart()
    assert rig.supervisor._children == rig.children[:1]
    assert rig.board.slot("engine", 1)[EngineField.SEATING] == Seating.VACANT
    assert not rig.seats.are_changing


@pytest.mark.parametrize(
    ("is_placed", "returns", "state"),
    [
        (1, True, State.READY),
        (1, False, State.READY),
        (0, True, State.READY),
        (1, True, State.STARTING),
    ],
)
def test_a_renewed_engine_of_ray_is_withdrawn(
    tmp_path: Path, is_placed: int, returns: bool, state: State
) -> None:
    """One that leaves for good is not: another would be placed at once. Nor is one that loads."""
    rig, address = Rig(), PlacedAddress(str(tmp_path), "engine 1")
    rig.supervisor.run_dir = str(tmp_path)
    rig.board.slot("engine", 1)[EngineField.IS_PLACED] = is_placed
    address.write("tcp://node:1")
    if returns:
        assert rig.seats.renew(1)
    else:
        rig.seats.resize(0, 1)
    rig.board.slot("engine", 1).enter(state)
    for _ in range(2):
        rig.supervisor._end_leaving()
    is_withdrawn = is_placed == 1 and returns and state == State.READY
    assert (address.read() is None) == is_withdrawn
    assert rig.board.slot("engine", 1)[EngineField.SEATING] == Seating.VACANT


def test_a_renewed_engine_of_ray_is_withdrawn_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that outlives its signal gets another. Its successor is placed by then."""
    rig, address = Rig(), PlacedAddress(str(tmp_path), "engine 1")
    rig.supervisor.run_dir = str(tmp_path)
    rig.board.slot("engine", 1)[EngineField.IS_PLACED] = 1
    assert rig.seats.renew(1)
    for _ in range(2):
        rig.supervisor._end_leaving()
    address.write("tcp://node:2")
    monkeypatch.setattr(engine_seats, "TOLD_AGAIN_S", 0.0)
    rig.supervisor._end_leaving()
    assert rig.seats.due() == {1: 3}, "it was told twice"
    assert address.read() == "tcp://node:2"


class OnDemandRig(Rig):
    """A server that goes on without engines. The first one is unloaded, and none starts."""

    def __init__(self) -> None:
        super().__init__()
        self.board.slot("engine", 0)[EngineField.SEATING] = Seating.VACANT
        self.supervisor._is_up = True
        self.supervisor._config = SimpleNamespace(max_loaded_models=1)
        groups: Any = [
            SimpleNamespace(
                card=SimpleNamespace(name="model"), config=SimpleNamespace(data_parallel_size=2)
            )
        ]
        policy = LoadPolicy([1], 1)
        self.supervisor._loads = ModelLoads(self.board, groups, self.seats, policy, lambda: 0)
        self.supervisor._spawn = self.spawn
        self.supervisor._crash_reports = SimpleNamespace(make=lambda *_: None)
        self.supervisor._selector = SimpleNamespace(unregister=lambda _fd: None)

    def spawn(self, seat: Seat) -> None:
        """Fail as where there are too many processes."""
        self.seats.take(seat.index)
        raise BlockingIOError("no process is left")

    def assert_failed(self, how: str) -> None:
        """Check that the second engine's seat is vacant, and that clients are told why."""
        slot = self.board.slot("engine", 1)
        assert slot[EngineField.SEATING] == Seating.VACANT
        assert slot[EngineField.FAILED_LOADS] == 1
        assert slot[EngineField.RETRY_NS] == FIRST_RETRY_S * 1e9
        assert slot.last_death.how == how
        assert self.children[1] not in self.supervisor._children


def test_an_engine_that_cannot_be_spawned_fails_its_load() -> None:
    rig = OnDemandRig()
    rig.supervisor._children = rig.children[:1]
    rig.supervisor._add_engine(1)
    rig.assert_failed("could not be started: no process is left")


def test_an_engine_that_cannot_be_spawned_again_fails() -> None:
    rig = OnDemandRig()
    for _ in range(4):
        rig.children[1].start_at = 0.0
        rig.supervisor._restart()
    rig.assert_failed("could not be started: no process is left")


def test_an_engine_on_demand_that_gives_up_ends_no_server() -> None:
    rig = OnDemandRig()
    rig.children[1].pidfd = os.open(os.devnull, os.O_RDONLY)
    rig.children[1].process.pid = 1
    rig.children[1].process.stacks = SimpleNamespace(take=lambda: "", close=lambda: None)
    rig.supervisor._handle_exit(rig.children[1], ExitStatus.BAD_MODEL)
    rig.assert_failed(f"exited with {int(ExitStatus.BAD_MODEL)}")


def test_a_cluster_that_is_away_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.supervisor.board = board = Board.create([Seat("placement", 0)])
    slot, reports = board.slot("placement"), []
    stacks = SimpleNamespace(take=list, close=lambda: None)
    process: Any = SimpleNamespace(pid=1, stacks=stacks)
    rig.supervisor._selector = SimpleNamespace(unregister=lambda _fd: None)
    rig.supervisor._crash_reports = SimpleNamespace(make=lambda *about: reports.append(about))
    rig.supervisor._is_up = True
    child = SeatedProcess(slot.seat, process, -1)
    slot.enter(State.READY)
    for code in (-signal.SIGKILL, *[ExitStatus.BAD_FLAGS] * 3):
        child.pidfd = os.open(os.devnull, os.O_RDONLY)
        slot.exit_reason = "" if code < 0 else "no cluster"
        rig.supervisor._handle_exit(child, code)
        slot.enter(State.STARTING)
    assert [record.message for record in caplog.records] == [
        "placement 0 was killed by SIGKILL; starting another",
        "placement 0 exited with 2 (no cluster); starting another",
    ]
    assert len(reports) == 1, "of the death that is none of the cluster's"


def test_telemetry_is_told_to_end_when_all_frontends_have() -> None:
    events: list[tuple[str, str]] = []

    def played(role: str) -> Any:
        def note(event: str, result: int | None = None) -> Any:
            return lambda *_: events.append((event, role)) or result

        return SimpleNamespace(terminate=note("told"), send_signal=int, wait=note("ended", 0))

    rig = Rig()
    rig.supervisor._listeners = None
    rig.supervisor._crash_reports = rig.supervisor._directory = SimpleNamespace(
        close=list, remove=list
    )
    roles = ("telemetry", "frontend", "engine")
    rig.supervisor._children = [SeatedProcess(Seat(r, 0), played(r), -1) for r in roles]
    rig.supervisor._stop()
    others = {event for event in events if event[1] != "telemetry"}
    assert len(others) == 4
    assert set(events[:4]) == others
    assert events[4:] == [("told", "telemetry"), ("ended", "telemetry")]


@pytest.mark.parametrize("seat", [Seat("tokenizer", 0), Seat("engine", 0)])
def test_a_successor_that_dies_is_not_told_as_replaced(
    caplog: pytest.LogCaptureFixture, seat: Seat
) -> None:
    caplog.set_level("INFO")
    rig = Rig()
    seats_once = dict.fromkeys([Seat("engine", 0), Seat("engine", 1), seat])
    rig.supervisor.board = board = Board.create(list(seats_once))
    for slot in board.slots:
        slot.enter(State.READY)
    rig.supervisor._engine_seats = seats = EngineSeats(board, 60)
    rig.supervisor._renewals = renewals = Renewals(board, seats)
    rig.supervisor._selector = SimpleNamespace(unregister=lambda _fd: None)
    reports: list[object] = []
    rig.supervisor._crash_reports = SimpleNamespace(make=lambda *about: reports.append(about))
    rig.supervisor._is_up = True

    def played() -> Any:
        stacks = SimpleNamespace(take=list, close=lambda: None)
        return SimpleNamespace(pid=1, stacks=stacks, send_signal=lambda _signal: None)

    child, slot = SeatedProcess(seat, played(), -1), board.slot(seat.role, seat.index)
    renewals.add(child)
    renewals.go_on()
    for _ in range(2):
        seats.due()  # an engine without requests is told to end
    for code in (0, -signal.SIGSEGV):
        child.pidfd = os.open(os.devnull, os.O_RDONLY)
        rig.supervisor._handle_exit(child, code)
        child.process, child.start_at = played(), None
        slot.enter(State.STARTING)
        renewals.go_on()
    assert [record.message for record in caplog.records] == [
        f"{seat} was replaced on request; starting another",
        f"{seat} was killed by SIGSEGV; starting another",
    ]
    assert slot.last_death.how == "was killed by SIGSEGV"
    assert len(reports) == 1
