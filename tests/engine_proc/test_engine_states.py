"""The engine of a model with states: what it says at the start, and how many sequences run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import FIRST, Rig, generate
from msgspec import structs

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
    execution = replace(rig.config.execution, kv_cache_memory_bytes=None)
    config = replace(rig.config, execution=execution)
    with caplog.at_level("WARNING"):
        for ready in (STATES, structs.replace(STATES, looks_ahead=True)):
            make_scheduler(make_pool(ready, config), ready, config)
    ways = "--kv-cache-memory-bytes", "--gpu-memory-utilization or --tp"
    assert [record.getMessage() for record in caplog.records] == [
        "2 state slots are enough for 1 running sequences, not for --max-num-seqs 2; lower that, "
        f"or raise {way}"
        for way in ways
    ]
    rig.take(generate(), generate(FIRST + (1 << 16)))
    rig.step()
    assert (rig.slot[EngineField.RUNNING], rig.slot[EngineField.WAITING]) == (1, 1)
    assert (rig.slot[EngineField.STATES_TOTAL], rig.slot[EngineField.STATES_FREE]) == (2, 1)
