"""Stages of a pipeline: the texts of one worker, also when a stage dies or lacks memory.

Where Ray places stages, a double of it stands for a cluster.
"""

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from killer import Killer
from mutants.mutants import mutants
from servers import RunningServer, wait_until
from stream_reader import difference, read_all

ASKED: dict[str, Any] = {"num_requests": 7, "max_tokens": 16}  # one of each kind of sampling
NUM_FEW = 4  # of these requests
EXACT = ("--dtype", "float32", "--kv-cache-dtype", "float32")


@pytest.fixture(scope="module")
def pipeline() -> Iterator[RunningServer]:
    """Two stages, of which the last is short of memory."""
    running = RunningServer(
        *("--pipeline-parallel-size", "2", *EXACT, "--max-num-seqs", "8"),
        *("--admin-api-key", "operator"),
        env=mutants("worker=short_of_memory"),
    )
    yield running
    assert running.stop() == 0
    assert re.search(
        r"there is no memory for a step of \d\d+ tokens: said the mutant; at most", running.log
    )


@pytest.fixture(scope="module")
def undisturbed(server: RunningServer) -> list[Any]:
    """The answers without stages."""
    return asyncio.run(read_all(server.url, **ASKED))


def test_answers_are_those_without_stages(pipeline: RunningServer, undisturbed: list[Any]) -> None:
    assert {"headrace: worker 0", "headrace: worker 1"} <= set(pipeline.ring)
    assert not difference(asyncio.run(read_all(pipeline.url, **ASKED)), undisturbed)
    assert pipeline.metric("engine_steps_ahead_total") > pipeline.metric("engine_steps_total") / 2


@pytest.mark.parametrize("victim", ["worker 0", "worker 1"])
def test_answers_go_on_when_a_stage_is_killed(
    pipeline: RunningServer, undisturbed: list[Any], victim: str
) -> None:
    killer = Killer(pipeline, victim, [30])
    assert not difference(asyncio.run(read_all(pipeline.url, killer, **ASKED)), undisturbed)
    assert len(killer.killed) == 1
    pipeline.settle()
    pipeline.await_free("kv_pages")


def test_stages_of_two_workers_one_step_at_a_time_change_no_text(undisturbed: list[Any]) -> None:
    running = RunningServer(
        *("--pp", "2", "--tp", "2", "--no-async-scheduling", *EXACT, "--max-num-seqs", "8")
    )
    few = ASKED | {"num_requests": NUM_FEW}
    assert not difference(asyncio.run(read_all(running.url, **few)), undisturbed[:NUM_FEW])
    assert len([title for title in running.ring if title.startswith("headrace: worker")]) == 4
    assert running.metric("engine_steps_total") > 0
    assert running.metric("engine_steps_ahead_total") == 0
    assert running.stop() == 0


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def apart(profiles: Path) -> Iterator[RunningServer]:
    """Two stages, of which the last is placed, as on another machine."""
    running = RunningServer(
        *("--pp", "2", "--distributed-executor-backend", "ray", *EXACT, "--max-num-seqs", "8"),
        *("--admin-api-key", "operator", "--profile-dir", str(profiles)),
        env={"PYTHONPATH": str(Path(__file__).parent.parent / "support/ray_double")},
    )
    yield running
    assert running.stop() == 0
    assert "stage 1 on 127.0.0.1 exited with 1; starting another" in running.log


def traced(server: RunningServer, profiles: Path) -> list[bool]:
    """Profile a completion; return of each stage's trace whether it has steps."""
    operator = {"Authorization": "Bearer operator"}
    for path in profiles.glob("worker-*"):
        path.unlink()
    httpx.post(f"{server.url}/start_profile", headers=operator).raise_for_status()
    body = {"prompt": "Once", "max_tokens": 32}
    httpx.post(f"{server.url}/v1/completions", json=body).raise_for_status()
    httpx.post(f"{server.url}/stop_profile", headers=operator).raise_for_status()
    found = [f"worker-{stage}-*.trace.json.gz" for stage in range(2)]
    wait_until(lambda: all(any(profiles.glob(one)) for one in found), "both stages have a trace")
    traces = [gzip.decompress(path.read_bytes()) for path in profiles.glob("worker-*")]
    return [bool(json.loads(trace)["traceEvents"]) for trace in traces]


def test_operators_get_profiles_of_stages_elsewhere(apart: RunningServer, profiles: Path) -> None:
    # A stage elsewhere hears of it a grant later, which may be after the completion.
    wait_until(lambda: all(traced(apart, profiles)), "both traces have steps")


def test_answers_are_the_same_when_the_machine_of_a_stage_dies(
    apart: RunningServer, undisturbed: list[Any]
) -> None:
    node = apart.processes["headrace: stage"]
    num_left = [30]

    def kill() -> None:
        num_left[0] -= 1
        if not num_left[0]:
            node.kill()

    names = ("engine_steps_ahead_total", "engine_steps_total")
    before = [apart.metric(name) for name in names]
    assert not difference(asyncio.run(read_all(apart.url, kill, **ASKED)), undisturbed)
    assert not node.is_running()
    num_ahead, num_steps = (apart.metric(n) - was for n, was in zip(names, before, strict=True))
    assert num_ahead > num_steps / 2
    apart.settle()
    apart.await_free("kv_pages")
