"""The seat of a stage's worker: what it makes of a stage that is wrong, silent or gone."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_configs import execution_config
from stage_nodes import new_key, remote_stages

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField
from headrace.config.process_configs import WorkerConfig
from headrace.engine_proc.child_processes.worker_group import result_bytes, step_bytes
from headrace.engine_proc.shm.grammar_bitmask import GrammarBitmask
from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.engine_proc.stages import seat as module
from headrace.engine_proc.stages.node import OwnTerms
from headrace.engine_proc.stages.seat import StageFailed, StageLost, StageSeat
from headrace.exit_status import ExitStatus
from headrace.ipc.curve_key import read_key
from headrace.ipc.curve_links import CurveListener
from headrace.ipc.messages import Message
from headrace.ipc.remote_messages import StageGrant, StageStatus, ToStage, WorkerInput, WorkerOutput
from headrace.ipc.schema_fingerprint import code_version
from headrace.ipc.worker_messages import (
    AdapterLoaded,
    FromWorker,
    Masks,
    Step,
    StepFailed,
    StepResult,
    ToWorker,
    WorkerReady,
)
from headrace.native_core import best_kernels
from headrace.runtime.placed_address import PlacedAddress
from headrace.runtime.process import Context
from support.ports import reserved_port

RUN = 5
EXECUTION = execution_config("model", pp=3, vocab_size=64)
READY = WorkerReady(1, 16, hidden_size=4)
STEP = Step(
    token_ids=b"",
    positions=b"",
    sequences=b"",
    page_table=b"",
    logit_rows=bytes(4),
    rows=b"",
    masked_rows=bytes(4),
)
TOKEN = StepResult((63).to_bytes(4, "little"))
DEADLINE_S = 60.0
encode = msgspec.msgpack.encode


class Site:
    """A seat of the last stage, its engine, and a test in place of the stage's machine."""

    def __init__(self, folder: Path) -> None:
        key = new_key(folder / "key")
        with reserved_port() as port:
            self.listener = CurveListener(f"tcp://127.0.0.1:{port}", read_key(str(key)), "")
        board = Board.create([Seat("worker", 2)])
        self.slot = board.slot("worker", 2)
        self.masks = GrammarBitmask.create(2, EXECUTION.vocab_size)
        steps: StepChannel[ToWorker] = StepChannel.create(ToWorker, step_bytes(EXECUTION))
        results: StepChannel[FromWorker] = StepChannel.create(FromWorker, result_bytes(EXECUTION))
        self.steps, self.results = steps, results
        remote = remote_stages(folder, key, str(folder))
        config = WorkerConfig(
            execution=EXECUTION,
            step_fd=steps.fd,
            result_fd=results.fd,
            mask_fd=self.masks.fd,
            stage=2,
            remote=remote,
            run=RUN,
        )
        context = Context(Seat("worker", 2), board, self.slot, "error", os.getpid())
        self.place = PlacedAddress(str(folder), "stage 2")
        self.place.write(self.listener.where)
        self.seat = StageSeat(config, remote, context)
        self.peer = self.input_peer = b""
        self.grant: StageGrant | None = None
        self.inputs: list[list[bytes]] = []
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToStage)

    def work(self) -> None:
        """Have the seat and the listener do what they can."""
        self.listener.admit()
        while (received := self.listener.receive()) is not None:
            peer, frames = received
            message = self._decoder.decode(frames[0])
            if isinstance(message, StageGrant):
                self.peer, self.grant = peer, message
            elif isinstance(message, WorkerInput):
                self.input_peer = peer
                self.inputs.append([bytes(frame) for frame in frames[1:]])
        self.seat.work()

    def work_until(self, predicate: Callable[[], bool]) -> None:
        """Work until something is so."""
        until = time.monotonic() + DEADLINE_S
        while not predicate():
            assert time.monotonic() < until
            self.work()

    def send(self, message: Message, *frames: bytes) -> None:
        """Send the seat a message."""
        assert self.listener.send(self.peer, [encode(message), *frames])

    def output(self, message: Message) -> None:
        """Send an output of the worker."""
        self.send(WorkerOutput(RUN), encode(message))

    def serve(self) -> None:
        """Have the worker be ready."""
        self.work_until(lambda: self.grant is not None)
        self.output(READY)
        self.work_until(lambda: self.slot[CommonField.STATE] == State.READY)
        assert self.results.receive(0) == READY

    def close(self) -> None:
        """End the threads and sockets."""
        self.seat._inputs.close()
        if self.seat._link is not None:
            self.seat._link.close()
        self.listener.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def test_a_grant_has_all_that_a_stage_needs(site: Site) -> None:
    site.work_until(lambda: site.grant is not None)
    grant = site.grant
    assert grant is not None
    assert (grant.run, grant.stage, grant.following) == (RUN, 2, None)
    execution = msgspec.msgpack.decode(grant.execution, type=type(EXECUTION))
    assert execution == dataclasses.replace(EXECUTION, model_path=str(Path.cwd() / "model"))
    site.send(StageStatus(RUN, grant.sent_at, progress=300))
    site.work_until(lambda: site.slot[CommonField.PROGRESS] == 300)


def test_steps_and_masks_go_there_and_results_come_back(site: Site) -> None:
    site.serve()
    site.masks.allow_all(0)
    for message in (STEP, Masks()):
        site.steps.send(message)
    site.work_until(lambda: len(site.inputs) == 2)
    mask = b"\xff" * site.masks.mask_bytes
    assert site.inputs == [[encode(STEP)], [encode(Masks()), mask]]
    assert site.input_peer != site.peer, "no grant waits behind them"
    site.output(TOKEN)
    results: list[FromWorker | None] = []

    def has_result() -> bool:
        results.append(site.results.receive(0))
        return results[-1] is not None

    site.work_until(has_result)
    assert results[-1] == TOKEN


@pytest.mark.parametrize(
    ("has_step", "output", "why"),
    [
        (False, TOKEN, "a result without a step"),
        (False, StepFailed("memory"), "a failure without a step"),
        (False, READY, "ready twice"),
        (False, AdapterLoaded(0), "AdapterLoaded"),
        (True, StepResult((64).to_bytes(4, "little")), "vocabulary of 64"),
        (True, StepResult(b"\xff" * 4), "vocabulary of 64"),
        (True, StepResult(bytes(8)), "a result of 1 rows"),
    ],
)
def test_what_a_stage_cannot_send_ends_its_run(
    site: Site, has_step: bool, output: Message, why: str
) -> None:
    site.serve()
    if has_step:
        site.steps.send(STEP)
        site.work_until(lambda: bool(site.inputs))
    site.output(output)
    with pytest.raises(StageFailed, match=f"sends what is wrong: .*{why}") as failure:
        site.work_until(lambda: False)
    assert failure.value.exit_status is ExitStatus.FAILED, "it counts in a row"
    assert site.results.receive(0) is None


@pytest.mark.parametrize("progress", [-1, 1 << 63])
def test_a_progress_that_no_worker_has_is_wrong(site: Site, progress: int) -> None:
    site.work_until(lambda: site.grant is not None)
    site.send(StageStatus(RUN, 0, progress))
    with pytest.raises(StageFailed, match=f"progress is {progress}"):
        site.work_until(lambda: False)


def test_outputs_of_another_run_are_not_heard(site: Site) -> None:
    site.serve()
    site.send(WorkerOutput(RUN + 1), encode(TOKEN))
    site.send(StageStatus(RUN + 1, 0, why="late", exit_status=1))
    site.send(StageStatus(RUN, 0, progress=7))
    site.work_until(lambda: site.slot[CommonField.PROGRESS] == 7)


@pytest.mark.parametrize("status", [ExitStatus.BAD_MODEL, ExitStatus.SHORT_OF, 99])
def test_a_seat_ends_as_the_worker_there(site: Site, status: int) -> None:
    site.work_until(lambda: site.grant is not None)
    site.send(StageStatus(RUN, 0, why="worker 2 could not start", exit_status=status))
    with pytest.raises(StageFailed, match="could not start at tcp://") as death:
        site.work_until(lambda: False)
    assert death.value.exit_status == (ExitStatus.FAILED if status == 99 else status)


def test_why_a_worker_there_cannot_start_is_said_once(site: Site) -> None:
    site.work_until(lambda: site.grant is not None)
    why = "worker 2 could not start: there is no memory"
    site.send(StageStatus(RUN, 0, why=why, exit_status=ExitStatus.BAD_FLAGS))
    with pytest.raises(StageFailed, match=r"^at tcp://\S+: there is no memory$"):
        site.work_until(lambda: False)


def test_a_crash_report_has_the_output_of_the_worker_there(site: Site) -> None:
    site.work_until(lambda: site.grant is not None)
    output = "what it said\nFatal Python error"
    site.send(StageStatus(RUN, 0, why="worker 2 was killed", exit_status=1, output=output))
    with pytest.raises(StageFailed):
        site.work_until(lambda: False)
    assert site.slot.log_tail.endswith(f"{output}\n")


def test_a_stage_that_is_silent_is_lost(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.1)
    site.seat._grants = module.Grants(time.monotonic(), 0.1)
    site.work_until(lambda: "waiting for stage 2" in site.seat._told)
    site.serve()
    with pytest.raises(StageLost, match="cannot be heard"):
        site.work_until(lambda: False)


def test_a_seat_follows_its_stage_until_that_serves(site: Site) -> None:
    site.work_until(lambda: site.grant is not None)
    site.place.write(None)
    site.work_until(lambda: site.seat._link is None)
    site.grant = None
    site.place.write(site.listener.where)
    site.serve()
    site.send(StageStatus(RUN, 0, why="no grant has come", has_ended=True))
    with pytest.raises(StageLost, match="has ended its run: no grant has come"):
        site.work_until(lambda: False)


@pytest.mark.parametrize("kernels", ["", best_kernels(), "abacus"])
def test_a_stage_with_other_kernels_is_told_of(
    site: Site, caplog: pytest.LogCaptureFixture, kernels: str
) -> None:
    site.work_until(lambda: site.grant is not None)
    site.send(StageStatus(RUN, 0, kernels=kernels))
    site.serve()
    told = f"has other kernels (abacus) than stage 0 ({best_kernels()}): texts may differ"
    assert (told in caplog.text) == (kernels == "abacus")


def test_a_machine_without_the_files_has_no_stage(tmp_path: Path) -> None:
    def grant(path: Path, digest: str, version: str) -> StageGrant:
        execution = encode(dataclasses.replace(EXECUTION, model_path=str(path)))
        terms = {"version": version, "digest of weights": digest}
        return StageGrant(RUN, 0, 1, None, execution, 8, terms, [0, 0])

    own, version = OwnTerms(), code_version()
    lack = own.differences(grant(tmp_path / "none", "", version))
    assert f"there is no {tmp_path / 'none'} here" in lack
    assert "digest of weights: other at the server" in own.differences(
        grant(tmp_path, "other", version)
    )
    assert not own.differences(grant(tmp_path, own._digest, version))
    assert "version: older at the server" in own.differences(grant(tmp_path, own._digest, "older"))
