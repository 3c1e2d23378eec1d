"""Profiles begin and end as operators ask, and leave a trace that tools can read."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.board.admin_requests import (
    PROFILE,
    START_PROFILE,
    STOP_PROFILE,
    AdminRequests,
    admin_request,
)
from headrace.board.board import Board, Seat
from headrace.engine_proc.worker.profiler import MAX_TRACES, Profiler, Recorder, StepTimes
from headrace.engine_proc.worker.torch_profile import TorchProfile


class Rig:
    """A worker's profiles, and the slot where a frontend notes what operators ask."""

    def __init__(self, directory: Path | None, record: type[Recorder] = StepTimes) -> None:
        board = Board.create([Seat("frontend", 0)])
        self.slot = board.slot("frontend")
        where = None if directory is None else str(directory)
        self.profiles = Profiler(where, "worker-0", AdminRequests(board, PROFILE), record)

    def ask(self, what: str) -> None:
        admin_request(self.slot, what)
        self.profiles.look()

    def step(self, num_tokens: int = 1) -> None:
        self.profiles.began()
        torch.ones(8).cumsum(0)
        self.profiles.took(num_tokens)


def events_in(directory: Path) -> list[list[dict[str, Any]]]:
    """Return the events of each trace, the oldest first."""
    traces = [gzip.decompress(path.read_bytes()) for path in sorted(directory.iterdir())]
    return [json.loads(trace)["traceEvents"] for trace in traces]


def test_a_profile_has_the_steps_between_two_requests(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "made")
    rig.step()
    rig.ask(START_PROFILE)
    rig.ask(START_PROFILE)  # it goes on
    rig.step(5)
    rig.step(1)
    rig.ask(STOP_PROFILE)
    rig.step()
    rig.ask(STOP_PROFILE)
    (events,) = events_in(tmp_path / "made")
    assert [event["args"]["tokens"] for event in events] == [5, 1]
    assert events[0]["ts"] + events[0]["dur"] <= events[1]["ts"]


def test_a_profile_that_ends_as_another_begins_leaves_two(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "made")
    rig.ask(START_PROFILE)
    rig.step(5)
    admin_request(rig.slot, STOP_PROFILE)
    rig.ask(START_PROFILE)
    rig.step(7)
    rig.ask(STOP_PROFILE)
    found = [
        [event["args"]["tokens"] for event in events] for events in events_in(tmp_path / "made")
    ]
    assert found == [[5], [7]]


def test_torch_s_profile_has_operators(tmp_path: Path) -> None:
    rig = Rig(tmp_path, TorchProfile)
    rig.ask(START_PROFILE)
    rig.step()
    rig.ask(STOP_PROFILE)
    (events,) = events_in(tmp_path)
    assert "aten::cumsum" in {event["name"] for event in events}


def test_a_profile_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimes, "max_steps", 2)
    rig = Rig(tmp_path)
    rig.ask(START_PROFILE)
    for _ in range(3):
        rig.step()
    assert [len(events) for events in events_in(tmp_path)] == [2]


def test_the_oldest_traces_go(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for num_tokens in range(MAX_TRACES + 2):
        rig.ask(START_PROFILE)
        rig.step(num_tokens)
        rig.ask(STOP_PROFILE)
    kept = [events[0]["args"]["tokens"] for events in events_in(tmp_path)]
    assert kept == list(range(2, MAX_TRACES + 2))


def test_what_cannot_be_written_is_said_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    rig = Rig(tmp_path / "file")
    rig.ask(START_PROFILE)
    rig.step()
    rig.ask(STOP_PROFILE)
    assert "a profile of 1 steps is lost: " in caplog.text


def test_profiler_without_a_directory_never_polls() -> None:
    rig = Rig(None)
    rig.ask(START_PROFILE)
    rig.step()
    assert rig.profiles._recorder is None
