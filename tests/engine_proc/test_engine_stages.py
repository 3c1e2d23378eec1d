"""The engine has a step in each stage of a pipeline."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_rig import Rig, Sevens, generate

from headrace.board.fields import EngineField
from headrace.engine_proc.scheduling.step_time_model import PATIENCE_S
from headrace.ipc.worker_messages import StepFailed, StepResult


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(tmp_path, **request.param)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("rig", "num_times"),
    [({}, 1), ({"pp": 3}, 3), ({"pp": 3, "async_scheduling": False}, 1)],
    indirect=["rig"],
)
def test_a_step_may_take_the_time_of_all_stages(rig: Rig, num_times: int) -> None:
    """Of several in flight, a time is that of one stage."""
    rig.take(generate())
    due, patience = [], []

    class Witness(Sevens):
        def finish(self, patience_s: float | None = None) -> StepResult | StepFailed:
            due.append(rig.slot[EngineField.STEP_DUE_NS] - time.monotonic_ns())
            patience.append(patience_s)
            return super().finish()

    workers = Witness()
    while rig.scheduler.has_work:
        rig.engine.run_once(workers)  # type: ignore[arg-type]
    assert patience == [None, pytest.approx(num_times * PATIENCE_S, rel=0.01)]
    assert (num_times - 1) * PATIENCE_S < due[1] / 1e9 < (num_times + 0.01) * PATIENCE_S
