"""What the placement process makes of a cluster that is in trouble, by a double of Ray."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from headrace.config.process_configs import PlacementConfig
from headrace.ipc.curve_key import CurveKey

DOUBLE = Path(__file__).parents[2] / "support/ray_double"
PLACEMENT = "headrace.engine_proc.placement"
NAMES = ("stage 1", "stage 2")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The cluster's module, which has the double, be Ray installed or not."""
    with patch.dict(sys.modules):
        for name in list(sys.modules):
            if name.partition(".")[0] == "ray" or name.startswith(PLACEMENT):
                del sys.modules[name]
        monkeypatch.syspath_prepend(DOUBLE)
        yield importlib.import_module(f"{PLACEMENT}.ray_cluster")


@pytest.fixture
def cluster(module: ModuleType) -> Any:
    config = PlacementConfig(
        run_dir="",
        key_file="",
        seats={name: ("worker", i) for i, name in enumerate(NAMES, 1)},
        num_cpus=2,
        num_gpus=0,
        flags={"log_level": "error"},
        are_stages=True,
    )
    return module.RayCluster(config, CurveKey(b"", b""))


def failing(error: Exception) -> Callable[..., Any]:
    """Return what raises an error."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("what", ["placement_group", "ray.remote"])
def test_a_start_that_the_cluster_refuses_is_an_end(
    module: ModuleType, cluster: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with monkeypatch.context() as trouble:
        error = module.RayError("no answer\nwithin 60 s")
        trouble.setattr(f"{module.__name__}.{what}", failing(error))
        for name in NAMES:
            cluster.start(name)
            cluster.wait(0)
            ended = cluster.poll(name)
            assert ended == module.EngineEnded("cannot be started: no answer within 60 s")
            cluster.end(name)
    assert cluster.shortage(NAMES[0]) == ""


def test_an_actor_that_cannot_be_ended_is_let_go(
    module: ModuleType, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster._actors[NAMES[0]] = object()
    monkeypatch.setattr(module.ray, "kill", failing(module.RayError("no answer")))
    cluster.end(NAMES[0])
    assert not cluster._actors
