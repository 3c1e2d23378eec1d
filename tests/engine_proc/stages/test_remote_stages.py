"""Stages on other machines: real workers behind encrypted links, their bits and their deaths."""

import dataclasses
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from engine_configs import engine_config
from servers import wait_until
from stage_nodes import RunningStage, new_key, place, remote_stages
from tiny_models import make_byte_folder

from headrace.board.board import Board, Seat
from headrace.config.process_configs import EngineConfig
from headrace.engine_proc.child_processes.child_process import WorkerDied
from headrace.engine_proc.child_processes.worker_group import WorkerGroup
from headrace.engine_proc.shm.grammar_bitmask import GrammarBitmask
from headrace.engine_proc.step.sampling_metadata import pack
from headrace.ipc.curve_key import read_key
from headrace.ipc.curve_links import CurveLink
from headrace.ipc.messages import Sampling
from headrace.ipc.worker_messages import Step, StepFailed, StepResult
from headrace.runtime.placed_address import PlacedAddress
from headrace.runtime.process import Context
from headrace.supervision.engine_files import make_cache_files

NUM_STAGES = 3
VOCAB_SIZE = 257
PROMPT = range(100, 130)
ALLOWED = 77  # the only token of a mask


def ints(numbers: Sequence[int]) -> bytes:
    """Return a column of a step."""
    return np.array(numbers, np.int32).tobytes()


def step(first: int, tokens: Sequence[int], is_masked: bool = False) -> Step:
    """Return a step of a sequence whose tokens before `first` are in its page."""
    return Step(
        token_ids=ints(tokens),
        positions=ints(range(first, first + len(tokens))),
        sequences=bytes(4 * len(tokens)),
        page_table=bytes(4),
        logit_rows=ints([len(tokens) - 1]),
        rows=pack(Sampling(logprobs=2), first + len(tokens), (0, 0, 0), (0, 0)),
        masked_rows=ints([0]) if is_masked else b"",
    )


STEPS = [step(0, PROMPT), step(30, [7]), step(31, [8], is_masked=True)]
Result = StepResult | StepFailed


class Rig:
    """The workers of an engine."""

    def __init__(self, config: EngineConfig) -> None:
        num_workers = config.execution.num_workers
        seats = [Seat("engine", 0), *(Seat("worker", i) for i in range(num_workers))]
        self.board = Board.create(seats)
        context = Context(seats[0], self.board, self.board.slot("engine"), "info", os.getpid())
        fds = make_cache_files(num_workers)
        self.workers = WorkerGroup(dataclasses.replace(config, cache_fds=fds), context)

    def run(self, *steps: Step) -> list[Result]:
        """Return the results of steps that are in flight together."""
        for one in steps:
            self.workers.start(one)
        results = []
        for one in steps:
            if one.masked_rows:
                allow_one(self.workers.masks)
                self.workers.masks_written()
            results.append(self.workers.finish())
        return results

    def await_death(self) -> WorkerDied:
        """Return how a worker has died, and have others started."""
        deaths: list[WorkerDied] = []

        def has_died() -> bool:
            try:
                self.workers.check()
            except WorkerDied as death:
                deaths.append(death)
            return bool(deaths)

        wait_until(has_died, "a worker has died")
        self.workers.replace(deaths[0], [])
        return deaths[0]

    def restart(self) -> None:
        """Wait for the new workers."""
        wait_until(self.workers.are_ready, "new workers are ready")


def allow_one(area: GrammarBitmask) -> None:
    """Write a mask with one token."""
    area.allow_all(0)
    area.allow_only(0, (1 << ALLOWED).to_bytes(area.mask_bytes, "little"))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = tmp_path_factory.mktemp("stages") / "model"
    make_byte_folder(model, num_hidden_layers=NUM_STAGES)
    return engine_config(
        model_path=str(model),
        dtype="float32",
        kv_cache_dtype="float32",
        kv_cache_memory_bytes=1 << 20,
        vocab_size=VOCAB_SIZE,
    )


@pytest.fixture(scope="module")
def expected(config: EngineConfig) -> list[Result]:
    """The results without stages."""
    alone = Rig(config)
    alone.workers.wait_ready()
    results = [result for one in STEPS for result in alone.run(one)]
    alone.workers.stop()
    token = results[-1]
    assert isinstance(token, StepResult)
    assert token.token_ids == ints([ALLOWED])
    return results


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def nodes(run_dir: Path) -> list[RunningStage]:
    """The machines of all stages but the first."""
    key_file = new_key(run_dir / "key")
    return [RunningStage(key_file) for _ in range(NUM_STAGES - 1)]


@pytest.fixture(scope="module")
def rig(config: EngineConfig, run_dir: Path, nodes: list[RunningStage]) -> Iterator[Rig]:
    """An engine with stages on other machines."""
    execution = dataclasses.replace(
        config.execution, pp=NUM_STAGES, distributed_executor_backend="ray"
    )
    stages = remote_stages(run_dir, run_dir / "key", execution.model_path)
    place(run_dir, *nodes)
    made = Rig(dataclasses.replace(config, execution=execution, remote_stages=stages))
    made.workers.wait_ready()
    yield made
    made.workers.stop()


def worker_of(node: RunningStage, stage: int) -> psutil.Process:
    """Return the worker on a machine."""
    found = psutil.Process(node.process.pid).children(recursive=True)
    (worker,) = (one for one in found if one.cmdline()[:1] == [f"headrace: worker {stage}"])
    return worker


def test_stages_of_other_machines_give_the_bits_of_one_worker(
    rig: Rig, expected: list[Result]
) -> None:
    assert [result for one in STEPS for result in rig.run(one)] == expected
    assert rig.run(*STEPS) == expected, "in flight together"


def test_pages_outlive_a_worker_on_another_machine(
    rig: Rig, nodes: list[RunningStage], expected: list[Result]
) -> None:
    before = rig.workers.cache_id
    worker_of(nodes[1], 2).send_signal(signal.SIGKILL)
    death = rig.await_death()
    assert "worker 2 was killed by SIGKILL at tcp://" in str(death)
    assert not death.is_from_outside
    rig.restart()
    assert rig.workers.cache_id == before
    assert rig.run(*STEPS[1:]) == expected[1:], "the prompt is in its page"


def test_a_lost_machine_is_no_fault_of_a_sequence(
    rig: Rig, nodes: list[RunningStage], run_dir: Path, expected: list[Result]
) -> None:
    before = rig.workers.cache_id
    nodes[1].close()
    death = rig.await_death()
    assert death.is_from_outside
    assert death.keeps_pages, "those of the other stages"
    PlacedAddress(str(run_dir), "stage 2").write(None)
    nodes[1].start()
    place(run_dir, *nodes)
    rig.restart()
    assert rig.workers.cache_id != before
    assert rig.run(*STEPS) == expected


def test_peers_without_the_key_and_garbage_end_nothing(
    rig: Rig, nodes: list[RunningStage], tmp_path: Path, expected: list[Result]
) -> None:
    where = urlsplit(nodes[0].where)
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b""):
        with socket.create_connection((where.hostname, where.port or 0)) as peer:
            peer.sendall(data)
    stranger = CurveLink(nodes[0].where, read_key(str(new_key(tmp_path / "key"))))
    wait_until(lambda: bool(stranger.lost_connections()), "it is refused")
    stranger.close()
    assert rig.run(*STEPS) == expected


def test_what_is_wrong_from_a_peer_with_the_key_ends_a_run(
    rig: Rig, nodes: list[RunningStage], run_dir: Path, expected: list[Result]
) -> None:
    link = CurveLink(nodes[1].where, read_key(str(run_dir / "key")))

    def is_sent() -> bool:
        link.lost_connections()
        return link.send([b""])

    wait_until(is_sent, "a message without a byte is sent")
    death = rig.await_death()
    assert "the stage was sent what is wrong: Input data was truncated" in str(death)
    assert not death.is_from_outside, "it counts in a row"
    rig.restart()
    assert rig.run(*STEPS) == expected
    link.close()
