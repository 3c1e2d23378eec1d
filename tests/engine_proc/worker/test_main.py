"""A worker looks for steps and results in turn; one that fails ends what others' GPUs wait for."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from headrace.engine_proc.collectives.collectives import CollectiveOutcome
from headrace.engine_proc.collectives.control_page import ControlPage
from headrace.engine_proc.worker import main
from headrace.engine_proc.worker.main import ending_waits
from headrace.ipc.worker_messages import Step


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_worker_that_fails_ends_the_others_waits(error: type[BaseException]) -> None:
    page = ControlPage.create()
    with ending_waits(page.fd):
        pass
    assert page.aborted is CollectiveOutcome.OK
    with pytest.raises(error), ending_waits(page.fd):
        raise error
    assert page.aborted is CollectiveOutcome.ABORTED


def test_a_worker_without_peers_has_no_waits_to_end() -> None:
    with pytest.raises(ZeroDivisionError), ending_waits(None):
        raise ZeroDivisionError


STEP = Step(token_ids=b"", positions=b"", sequences=b"", page_table=b"", logit_rows=b"", rows=b"")


class Answers:
    """Results of a GPU: that of a step is there when it is asked for the third time."""

    def __init__(self, *_: Any) -> None:
        self.is_open = False
        self.num_asked = 0

    def add(self, promise: object) -> None:
        self.is_open = True

    @property
    def is_due(self) -> bool:
        self.num_asked += self.is_open
        return self.num_asked == 3

    def flush(self) -> None:
        self.is_open = False


def test_a_worker_asks_for_a_result_between_looks_for_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a GPU computes, each look and each sleep are short."""
    looks: list[tuple[float, int]] = []

    def receive(wait_s: float, look_us: int) -> Step | None:
        looks.append((wait_s, look_us))
        if len(looks) == 5:
            raise SystemExit
        return STEP if len(looks) == 1 else None

    quiet = SimpleNamespace(look=int, began=int, took=lambda _: None)
    stand_ins: dict[str, Any] = {
        **dict.fromkeys(("StepChannel", "GrammarBitmask", "join", "load"), anything),
        **dict.fromkeys(("AdminRequests", "WorkerReady", "gpu_name", "embeddings"), anything),
        "StepInbox": lambda *_: SimpleNamespace(receive=receive),
        "StepRunner": lambda *_: SimpleNamespace(run=lambda step, masks_of: None),
        "ResultSender": Answers,
        "Profiler": lambda *_: quiet,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(main, name, stand_in)
    with pytest.raises(SystemExit):
        main.work(anything(), anything())
    idle, *busy, after = looks
    assert busy == [busy[0]] * 3
    wait_s, look_us = busy[0]
    assert look_us * 1e-6 < wait_s < main.LOOK_US * 1e-6
    assert idle == after == (main.IDLE_S, main.LOOK_US)


def anything(*_: Any, **__: Any) -> Any:
    """Return what has all attributes and takes all calls."""
    return MagicMock()
