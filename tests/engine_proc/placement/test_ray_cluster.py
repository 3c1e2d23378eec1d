"""What the placement process makes of a cluster that is in trouble, by a double of Ray."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from ray_modules import beside_double

from headrace.config.process_configs import PlacementConfig
from headrace.errors import ConfigError
from headrace.ipc.curve_key import CurveKey
from support.ports import reserved_port

NAMES = ("stage 1", "stage 2")


@pytest.fixture
def module() -> Iterator[ModuleType]:
    with beside_double("ray_cluster") as found:
        yield found


CONFIG = PlacementConfig(
    run_dir="",
    key_file="",
    seats={name: ("worker", i) for i, name in enumerate(NAMES, 1)},
    num_cpus=2,
    num_gpus=0,
    flags={"log_level": "error"},
    are_stages=True,
)


@pytest.fixture
def cluster(module: ModuleType) -> Any:
    return module.RayCluster(CONFIG, CurveKey(b"", b""))


@pytest.mark.parametrize(("address", "joined"), [(None, "auto"), ("auto", "auto"), ("a", "a")])
def test_the_cluster_at_the_address_is_joined(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, address: str | None, joined: str
) -> None:
    seen: list[object] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        f"{module.__name__}.ray.init", lambda address, **_: seen.append(address), raising=False
    )
    module.RayCluster(replace(CONFIG, address=address), CurveKey(b"", b""))
    assert seen == [joined]


def test_an_address_where_nothing_listens_is_refused(module: ModuleType) -> None:
    with reserved_port() as port:
        config = replace(CONFIG, address=f"127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=f"^--address 127.0.0.1:{port} cannot be reached"):
            module.RayCluster(config, CurveKey(b"", b""))


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
    cluster._actors[NAMES[0]] = cluster._starts[NAMES[0]] = object()
    monkeypatch.setattr(module.ray, "kill", failing(module.RayError("no answer")))
    cluster.end(NAMES[0])
    assert not (cluster._actors or cluster._starts), "an answer that wakes `wait` for ever"


class IdleActor:
    """An actor that starts nothing."""

    def start(self, *_: object) -> str:
        """Have an address at once."""
        return "tcp://node:1"


def test_an_engine_that_leaves_frees_its_group(module: ModuleType) -> None:
    config = replace(CONFIG, seats={"engine 1": ("engine", 1)}, are_stages=False)
    cluster = module.RayCluster(config, CurveKey(b"", b""))
    cluster._actor_class = IdleActor
    cluster.start("engine 1")
    (group,) = cluster._groups.values()
    cluster.leave("engine 1")
    removed = sys.modules["ray.util.placement_group"].removed
    assert removed[-1] is group and not cluster._groups
    cluster.leave("engine 1")
    assert removed.count(group) == 1, "there is none any more"
    cluster.start("engine 1")
    assert cluster._groups, "a new one"
    cluster.leave("engine 1")
