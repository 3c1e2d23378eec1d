"""A Ray cluster: for each engine a bundle of resources on some node, and an actor in it.

The bundles and actors belong to this process: Ray ends them with it.
"""

import os
import time
from contextlib import suppress
from typing import Any, TypeAlias

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.config.process_configs import PlacementConfig
from headrace.engine_proc.placement.engine_actor import EngineActor
from headrace.engine_proc.placement.placed_engine import (
    EngineEnded,
    EngineStarted,
    NodeUnreachable,
    Outcome,
)
from headrace.engine_proc.placement.ray_errors import check_reachable, plain, why_lost
from headrace.errors import ConfigError
from headrace.ipc.curve_key import CurveKey
from headrace.ipc.schema_fingerprint import code_version

FLAG = "--data-parallel-backend ray"
Answer: TypeAlias = "ray.ObjectRef[str]"


class RayCluster:
    """The cluster that Ray finds: by RAY_ADDRESS, else one of this machine."""

    def __init__(self, config: PlacementConfig, key: CurveKey) -> None:
        """Join it.

        Raises:
            ConfigError: there is none, or one of another version.
        """
        check_reachable(os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(address="auto", log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise ConfigError(
                f"{FLAG} finds no cluster; run `ray start --head` on one machine and `ray start "
                f"--address=HEAD:6379` on the others and here, or set RAY_ADDRESS: {plain(error)}"
            ) from None
        except (RuntimeError, ValueError, RayError) as error:
            raise ConfigError(f"{FLAG} cannot join the cluster: {plain(error)}") from None
        self._resources = {"CPU": config.num_cpus, "GPU": config.num_gpus}
        self._flags = config.flags
        self._key = key
        self._groups: dict[int, PlacementGroup] = {}
        self._actors: dict[int, Any] = {}
        self._starts: dict[int, Answer] = {}  # by engine: calls that have not been answered
        self._watches: dict[int, Answer] = {}

    def start(self, engine: int) -> None:
        """Start an engine, as soon as a node has room for it."""
        group = self._groups.get(engine)
        if group is None:
            bundle = {name: count for name, count in self._resources.items() if count}
            group = self._groups[engine] = placement_group([bundle], strategy="STRICT_PACK")
        actor_class = ray.remote(EngineActor).options(
            num_cpus=self._resources["CPU"],
            num_gpus=self._resources["GPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        )
        actor = self._actors[engine] = actor_class.remote()
        self._starts[engine] = actor.start.remote(code_version(), self._flags, self._key.secret)

    def watch(self, engine: int) -> None:
        """Ask for the end of an engine that has started."""
        self._watches[engine] = self._actors[engine].wait.remote()

    def poll(self, engine: int) -> Outcome | None:
        """Return the answer to the last question; None is not yet."""
        calls = self._starts if engine in self._starts else self._watches
        if not ray.wait([calls[engine]], timeout=0)[0]:
            return None
        try:
            answer = ray.get(calls.pop(engine))
        except RayTaskError as error:
            return EngineEnded(plain(error.cause))
        except ActorUnavailableError:
            return NodeUnreachable()
        except RayError as error:
            return EngineEnded(why_lost(str(error), self._node_of(engine)))
        return EngineStarted(answer) if calls is self._starts else EngineEnded(answer)

    def end(self, engine: int) -> None:
        """End the actor of an engine, and with it what it has started."""
        with suppress(RayActorError):
            ray.kill(self._actors.pop(engine))

    def _node_of(self, engine: int) -> str:
        """Return the address of the node that has the bundle of an engine, or had it last."""
        with suppress(RayError, LookupError):  # the cluster may be in trouble just now
            bundles = placement_group_table(self._groups[engine])["bundles_to_node_id"]
            for node in ray.nodes():
                if node["NodeID"] == bundles[0]:
                    return str(node["NodeManagerAddress"])
        return "its node"

    def shortage(self, engine: int) -> str:
        """Return what an engine lacks that has no room; "" where it has, and starts.

        It is "", too, where the cluster cannot tell.
        """
        try:
            return self._shortage(engine)
        except (RayError, LookupError):
            return ""

    def _shortage(self, engine: int) -> str:
        if placement_group_table(self._groups[engine])["state"] == "CREATED":
            return ""
        needed = {name: count for name, count in self._resources.items() if count}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        free = ray.available_resources()
        have = "; ".join(
            f"{name}s: {', '.join(f'{node.get(name, 0):g}' for node in nodes)}, of which "
            f"{free.get(name, 0):g} are free"
            for name in needed
        )
        takes = " and ".join(f"{count} {name}s" for name, count in needed.items())
        return (
            f"waits for {takes} of one node, and the nodes have {have}; add a node, or lower "
            "--data-parallel-size"
        )

    def wait(self, seconds: float) -> None:
        """Wait until a question is answered, or so long."""
        open_calls = [*self._starts.values(), *self._watches.values()]
        if open_calls:
            ray.wait(open_calls, timeout=seconds)
        else:
            time.sleep(seconds)

    def close(self) -> None:
        """Leave the cluster, which ends all that was started."""
        ray.shutdown()
