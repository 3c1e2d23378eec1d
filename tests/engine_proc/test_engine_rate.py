"""The engine measures how fast it computes prompts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_rig import Rig, Sevens, generate

from headrace.board.fields import EngineField
from headrace.engine_proc.request_io import prefill_rate
from headrace.ipc.worker_messages import StepFailed, StepResult

STEP_S = 0.5


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_only_steps_with_prompts_tell_the_rate_of_prompts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_rate, "MIN_TOKENS", 1)

    class Timed(Sevens):
        def finish(self, patience_s: float | None = None) -> StepResult | StepFailed:
            rig.now += STEP_S
            return super().finish()

    rig.workers = Timed()
    rig.take(generate(), prompt=tuple(range(40)))
    for _ in range(2):
        rig.turn()
        assert rig.slot[EngineField.PREFILL_RATE] == 40 / STEP_S
    assert not rig.scheduler.has_work
