"""The engine of a model with states: what it says at the start, and how many sequences run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_rig import FIRST, Rig, generate

from headrace.board.fields import EngineField
from headrace.engine_proc.main import make_pool, make_scheduler
from headrace.ipc.worker_messages import WorkerReady

STATES = WorkerReady(num_pages=16, page_tokens=16, num_states=2)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, ready=STATES)
    yield made
    made.close()


def test_few_state_slots_let_few_sequences_run(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Two slots are for one sequence, of the two that --max-num-seqs lets run."""
    with caplog.at_level("WARNING"):
        make_scheduler(make_pool(STATES, rig.config), STATES, rig.config)
    assert "2 state slots are enough for 1 running sequences, not for --max-num-seqs 2; raise" in (
        caplog.text
    )
    rig.take(generate(), generate(FIRST + (1 << 16)))
    rig.step()
    assert (rig.slot[EngineField.RUNNING], rig.slot[EngineField.WAITING]) == (1, 1)
    assert (rig.slot[EngineField.STATES_TOTAL], rig.slot[EngineField.STATES_FREE]) == (2, 1)
