"""Workers that run a model together: real processes, started, stopped and killed."""

import dataclasses
import itertools
import os
import signal
import time
from array import array
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from engine_configs import engine_config
from servers import wait_until

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField
from headrace.config.model_card import find_demo_model
from headrace.engine_proc.child_processes import worker_group as module
from headrace.engine_proc.child_processes.child_process import END_S, ChildProcess, WorkerDied
from headrace.engine_proc.child_processes.worker_group import HANG_S, WorkerGroup
from headrace.engine_proc.step.sampling_metadata import pack
from headrace.exit_status import ExitStatus
from headrace.ipc.messages import Sampling
from headrace.ipc.worker_messages import (
    CopyPages,
    FromWorker,
    PagesCopied,
    Step,
    StepResult,
    ToWorker,
    WorkerReady,
)
from headrace.runtime.process import Context
from headrace.supervision.restart_backoff import DELAYS_S, PATIENT_S, RestartBackoff
from headrace.supervision.watchdog import HangWatchdog

CONFIG = engine_config(
    model_path=str(find_demo_model()),
    tp=2,
    dtype="float32",
    kv_cache_dtype="float32",
    kv_cache_memory_bytes=64 << 20,
    vocab_size=49152,
)
PROMPT = array("i", range(100, 130))
STEP = Step(
    token_ids=PROMPT.tobytes(),
    positions=array("i", range(len(PROMPT))).tobytes(),
    sequences=bytes(4 * len(PROMPT)),
    page_table=bytes(4),
    logit_rows=array("i", [len(PROMPT) - 1]).tobytes(),
    rows=pack(Sampling(logprobs=2), len(PROMPT), (0, 0, 0), (0, 0)),
)
OTHER = msgspec.structs.replace(STEP, token_ids=array("i", range(200, 230)).tobytes())


@pytest.fixture(scope="module")
def board() -> Board:
    return Board.create(
        [Seat("engine", 0), *(Seat("worker", rank) for rank in range(CONFIG.execution.tp))]
    )


@pytest.fixture(scope="module")
def workers(board: Board) -> Iterator[WorkerGroup]:
    engine = Seat("engine", 0)
    context = Context(engine, board, board.slot("engine"), "error", os.getpid())
    started = WorkerGroup(CONFIG, context)
    wait_until(lambda: board.slot("worker", 1)[CommonField.PID] != 0, "a worker")
    tell(board, 1, signal.SIGKILL)  # while they load: others do
    started.wait_ready()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def result(workers: WorkerGroup) -> StepResult:
    workers.start(STEP)
    return workers.finish()


def tell(board: Board, rank: int, what: signal.Signals) -> None:
    """Send a worker a signal."""
    os.kill(board.slot("worker", rank)[CommonField.PID], what)


def test_a_worker_that_is_stopped_is_waited_for(
    workers: WorkerGroup, board: Board, result: StepResult
) -> None:
    tell(board, 1, signal.SIGSTOP)
    workers.start(STEP)
    workers.check()
    tell(board, 1, signal.SIGCONT)
    assert workers.finish() == result


def test_of_workers_that_end_together_the_one_that_died_is_named(
    workers: WorkerGroup, board: Board, result: StepResult
) -> None:
    tell(board, 1, signal.SIGSTOP)  # so that the other waits for it
    workers.start(STEP)
    tell(board, 1, signal.SIGKILL)
    wait_until(lambda: board.slot("worker", 0).exit_reason == "rank 1 died", "worker 0 notices")
    wait_until(lambda: workers._all[0].has_lost_a_peer, "it exits with 6")
    with pytest.raises(WorkerDied, match=r"^worker 1 was killed by SIGKILL$") as death:
        workers.finish()
    workers.replace(death.value, [7])
    wait_until(workers.are_ready, "new workers")
    workers.start(STEP)
    assert workers.finish() == result


def test_stages_of_two_workers_each_give_the_bits_of_two_workers(
    workers: WorkerGroup, result: StepResult
) -> None:
    workers.start(OTHER)
    expected = [result, workers.finish()]
    assert expected[0] != expected[1], "it shows which step a result is of"
    board = Board.create([Seat("engine", 0), *(Seat("worker", index) for index in range(4))])
    context = Context(Seat("engine", 0), board, board.slot("engine"), "error", os.getpid())
    execution = dataclasses.replace(CONFIG.execution, pp=2)
    stages = WorkerGroup(dataclasses.replace(CONFIG, execution=execution), context)
    assert stages.wait_ready().num_pages > 0
    for step in (STEP, OTHER):  # in flight at once
        stages.start(step)
    assert [stages.finish() for _ in range(2)] == expected
    stages.start(STEP)
    tell(board, 3, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"^worker 3 was killed by SIGKILL$"):
        while True:  # it may have answered before
            stages.finish()
            stages.start(STEP)
    stages.stop()


def test_worker_killed_between_polls_is_named_not_its_peers() -> None:
    board = Board.create([Seat("worker", rank) for rank in range(2)])
    workers = WorkerGroup.__new__(WorkerGroup)
    workers._all = []
    for slot, code in zip(board.slots, (ExitStatus.PEER_LOST, -signal.SIGKILL), strict=True):
        slot.enter(State.READY)
        child: ChildProcess[Any, Any] = ChildProcess.__new__(ChildProcess)
        codes = itertools.chain([None], itertools.repeat(code))
        process: Any = SimpleNamespace(poll=lambda codes=codes: next(codes), pid=5)
        child._slot, child._hang_watchdog, child._process = slot, HangWatchdog(8), process
        workers._all.append(child)
    for _ in range(2):
        with pytest.raises(WorkerDied, match=r"^worker 1 was killed by SIGKILL$"):
            workers.check()


class Dying:
    """A worker that is there, and then has died."""

    has_lost_a_peer = False

    def receive(self, timeout_s: float) -> WorkerReady:
        return WorkerReady(1, 16)

    def send(self, message: ToWorker) -> None: ...

    def check(self, but_for_peers: bool = False) -> None:
        raise WorkerDied("worker 0 was killed")

    def make_crash_report(self, *_: object) -> None: ...

    def kill(self) -> None: ...

    def join(self, timeout_s: float) -> None: ...


def test_workers_that_disagree_are_an_error_and_not_two_texts(
    monkeypatch: pytest.MonkeyPatch, board: Board
) -> None:
    class Odd(Dying):
        def __init__(self, rank: int) -> None:
            self.token = rank

        def receive(self, timeout_s: float) -> StepResult:  # type: ignore[override]
            return StepResult(bytes([self.token]))

    monkeypatch.setattr(
        module, "start_worker", lambda _config, _context, place, *_: Odd(place.rank)
    )
    context = Context(Seat("engine", 0), board, board.slot("engine"), "error", os.getpid())
    workers = WorkerGroup(CONFIG, context)
    workers.start(STEP)
    with pytest.raises(AssertionError, match="workers disagree"):
        workers.finish()
    workers.stop()


def test_worker_killed_while_idle_is_always_replaced(
    monkeypatch: pytest.MonkeyPatch, board: Board
) -> None:
    monkeypatch.setattr(module, "start_worker", lambda *_: Dying())
    context = Context(Seat("engine", 0), board, board.slot("engine"), "error", os.getpid())
    clock = itertools.count(step=10)
    workers = WorkerGroup(CONFIG, context, clock=lambda: next(clock))

    def die(computes: bool) -> None:
        assert workers.are_ready()
        if computes:
            workers.start(STEP)
        with pytest.raises(WorkerDied) as death:
            workers.check()
        workers.replace(death.value, [])

    for _ in range(6):
        die(computes=False)
    for _ in range(2):
        die(computes=True)
    with pytest.raises(WorkerDied):
        die(computes=True)


def test_stages_lost_while_others_load_never_end_the_server(
    monkeypatch: pytest.MonkeyPatch, board: Board
) -> None:
    lost = WorkerDied("worker 1 exited with 7", code=ExitStatus.NODE_LOST)
    readies: list[WorkerReady | WorkerDied] = [*[lost] * 6, WorkerReady(1, 16)]

    class Loading(Dying):
        def receive(self, timeout_s: float) -> WorkerReady:
            ready = readies.pop(0) if len(readies) > 1 else readies[0]
            if isinstance(ready, WorkerDied):
                raise ready
            return ready

    monkeypatch.setattr(module, "start_worker", lambda *_: Loading())
    context = Context(Seat("engine", 0), board, board.slot("engine"), "error", os.getpid())
    delays: list[float] = []
    monkeypatch.setattr(time, "sleep", delays.append)
    workers = WorkerGroup(CONFIG, context, clock=lambda: 0.0)
    assert workers.wait_ready() == WorkerReady(1, 16)
    assert delays == [*DELAYS_S, PATIENT_S, PATIENT_S, PATIENT_S]


def test_gpus_are_those_of_the_workers(monkeypatch: pytest.MonkeyPatch, board: Board) -> None:
    class OnGpu(Dying):
        def __init__(self, gpu: str) -> None:
            self.gpu = gpu

        def receive(self, timeout_s: float) -> WorkerReady:
            return WorkerReady(1, 16, gpu=self.gpu)

    def kinds(*gpus: str) -> list[str]:
        monkeypatch.setattr(
            module, "start_worker", lambda _config, _context, place, *_: OnGpu(gpus[place.rank])
        )
        context = Context(Seat("engine", 0), board, board.slot("engine"), "error", os.getpid())
        workers = WorkerGroup(CONFIG, context)
        assert workers.gpus == []
        workers.wait_ready()
        return workers.gpus

    assert kinds("H200", "H200") == ["H200"]
    assert kinds("L4", "H200") == ["H200", "L4"]
    assert kinds("", "") == []


def test_the_crash_report_is_of_the_worker_in_the_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is the second one: its workers have the seats behind those of the first."""
    board = Board.create([Seat("engine", 0), *(Seat("worker", index) for index in range(5))])
    reported: list[int] = []

    class Seated(Dying):
        def __init__(self, index: int) -> None:
            self.index = index

        def make_crash_report(self, *_: object) -> None:
            reported.append(self.index)

    monkeypatch.setattr(
        module,
        "start_worker",
        lambda config, _context, place, *_: Seated(config.first_worker + place.index),
    )
    context = Context(Seat("engine", 0), board, board.slot("engine"), "error", os.getpid())
    workers = WorkerGroup(dataclasses.replace(CONFIG, first_worker=3), context)
    workers.replace(WorkerDied("worker 4 was killed", 4), [])
    assert reported == [4]


class HungWorker:
    """Beats, and answers nothing; notes what is done to it."""

    has_lost_a_peer = False

    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said

    def receive(self, timeout_s: float) -> None: ...

    def check(self, but_for_peers: bool = False) -> None: ...

    def give_up(self, reason: str) -> None:
        raise WorkerDied(f"{self._name} {reason}")

    def kill(self) -> None:
        self._said.append(f"kill {self._name}")

    def join(self, timeout_s: float) -> None:
        assert timeout_s <= END_S
        self._said.append(f"join {self._name}")


def hung_group(said: list[str], *, looks_ahead: bool) -> WorkerGroup:
    """Return two workers, of which none has anything to say, and whose clock runs fast."""
    group = WorkerGroup.__new__(WorkerGroup)
    board = Board.create([Seat("engine", 0)])
    group._context = Context(Seat("engine", 0), board, board.slot("engine"), "error", os.getpid())
    group._clock = itertools.count(0.0, HANG_S / 4).__next__
    group._layout = WorkerReady(1, 16, looks_ahead=looks_ahead)
    workers: Any = [HungWorker(name, said) for name in ("a", "b")]
    group._all, group._num_computing, group._page, group._groups = workers, 1, None, []
    group._config = CONFIG
    group._restarts = group._reconnects = RestartBackoff()
    return group


def test_copies_are_made_once_all_workers_have_made_them() -> None:
    group = hung_group([], looks_ahead=True)
    group._adapters, group._copies = ([deque(), deque()] for _ in range(2))
    said: list[list[FromWorker]] = [[PagesCopied(1.0), StepResult(b"1")], [StepResult(b"1")]]
    sent: list[ToWorker] = []
    for worker, own in zip(group._all, said, strict=True):
        worker.receive = lambda _, own=own: own.pop(0) if own else None  # type: ignore[misc]
        worker.send = sent.append  # type: ignore[method-assign]
    group.copy_pages(CopyPages(True, b"", b""))
    assert len(sent) == 2
    assert group.finish(patience_s=1.0) == StepResult(b"1"), "answers to copies come between"
    assert [*group.copied_pages()] == []
    said[1] += [PagesCopied(3.0), PagesCopied(2.0)]
    assert [*group.copied_pages()] == [3.0]


def test_a_gpu_that_hangs_is_given_up_within_a_bound() -> None:
    """Its worker's heart beats on."""
    with pytest.raises(WorkerDied, match="a is stuck in a step"):
        hung_group([], looks_ahead=True).finish(patience_s=1.0)


def test_a_worker_on_the_cpu_is_given_up_for_its_heart_alone() -> None:
    group = hung_group([], looks_ahead=False)
    looks: Any = itertools.chain(itertools.repeat(None, 50), [StepResult(b"1"), StepResult(b"1")])
    for worker in group._all:
        worker.receive = lambda _: next(looks)  # type: ignore[method-assign]
    assert group.finish(patience_s=1.0) == StepResult(b"1")


def test_all_workers_are_killed_before_one_is_waited_for() -> None:
    said: list[str] = []
    hung_group(said, looks_ahead=True).stop()
    assert said == ["kill a", "kill b", "join a", "join b"]
