"""Which steps are sent while another is computed."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_configs import engine_config
from engine_rig import FIRST, Rig

from headrace.engine_proc.main import SHORT_STEP_S, ahead_s
from headrace.ipc.messages import GenerateRequest, Sampling
from headrace.ipc.worker_messages import WorkerReady


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(tmp_path, **request.param)
    yield made
    made.close()


@pytest.mark.parametrize("rig", [{"ahead_s": SHORT_STEP_S}], indirect=True)
@pytest.mark.parametrize(("took_s", "is_ahead"), [(SHORT_STEP_S / 2, True), (60, False)])
def test_a_step_is_sent_while_a_short_one_is_computed(
    rig: Rig, took_s: float, is_ahead: bool
) -> None:
    rig.take(GenerateRequest(FIRST, 0, 9, Sampling(), [], b""))
    assert rig.turn() == ["start", "finish"], "it is not known yet how long they take"
    rig.engine._step_time.observe(1, took_s)
    assert rig.turn() == (["start"] if is_ahead else ["start", "finish"])


@pytest.mark.parametrize(
    ("flag", "on_gpus", "embedding_size", "expected"),
    [
        (None, False, None, SHORT_STEP_S),
        (None, False, 8, 0),
        (None, True, None, math.inf),
        (True, False, None, math.inf),
        (False, True, None, 0),
    ],
)
def test_how_long_a_step_may_take_for_another_to_be_sent(
    flag: bool | None, on_gpus: bool, embedding_size: int | None, expected: float
) -> None:
    config = engine_config(async_scheduling=flag, embedding_size=embedding_size)
    assert ahead_s(config, WorkerReady(16, 16, looks_ahead=on_gpus)) == expected


@pytest.mark.parametrize(
    ("rig", "num_texts", "is_ahead"),
    [
        ({"embedding_size": 8, "max_num_batched_tokens": 3}, 2, True),
        ({"embedding_size": 8, "max_num_batched_tokens": 4}, 2, False),
        ({"embedding_size": 8, "max_num_batched_tokens": 3, "max_num_seqs": 1}, 2, False),
        ({"embedding_size": 8, "max_num_batched_tokens": 3}, 1, False),
        ({"max_num_batched_tokens": 3}, 2, False),
        (
            {"embedding_size": 8, "max_num_batched_tokens": 3, "async_scheduling": False},
            2,
            False,
        ),
    ],
    indirect=["rig"],
)
def test_a_step_of_texts_is_sent_ahead_if_it_is_full(
    rig: Rig, num_texts: int, is_ahead: bool
) -> None:
    rig.take(*(GenerateRequest(FIRST + i, 0, 1, Sampling(), [], b"") for i in range(num_texts)))
    turns = [rig.turn().copy() for _ in range(2)]
    later = [["start"], ["start", "finish"]] if is_ahead else [["start", "finish"]] * num_texts
    assert turns[: len(later)] == later
