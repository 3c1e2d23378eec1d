"""An engine tells its workers whole histories again where they may have lost some."""

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_rig import FIRST, Rig, Sevens, Small

from headrace.ipc.messages import GenerateRequest, Sampling, request_id
from headrace.ipc.worker_messages import Step

PROMPT = (1, 2, 3)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def penalized(id: int) -> GenerateRequest:
    return GenerateRequest(id, 0, 9, Sampling(repetition_penalty=2.0), [], b"")


def told(step: Step) -> tuple[list[int], list[int]]:
    return array("i", step.history_updates).tolist(), array("i", step.history).tolist()


def test_new_workers_are_told_all(rig: Rig) -> None:
    rig.take(penalized(FIRST), prompt=PROMPT)
    seen = []
    for _ in range(2):
        rig.turn()
        seen.append(told(rig.workers.step))
    assert seen == [([0, 0, 3], [1, 2, 3]), ([0, 3, 1], [7])]
    rig.workers.lives = 0
    assert rig.turn() == ["start", "worker 0 died"]
    rig.workers = Sevens()
    rig.turn()
    assert told(rig.workers.step) == ([0, 0, 5], [1, 2, 3, 7, 7])


def test_workers_whose_step_has_failed_are_told_all(rig: Rig) -> None:
    other = request_id(0, 2)
    rig.workers = workers = Small(16)
    rig.take(penalized(FIRST), prompt=PROMPT)
    rig.turn()
    rig.take(penalized(other), prompt=tuple(range(20)))
    while "resume" not in workers.events:
        rig.turn()
    assert workers.sizes == [3, 21]
    rig.turn()
    assert told(workers.step)[0][:3] == [0, 0, 4]
    while rig.scheduler.has_work:
        rig.turn()
