"""A Ray cluster: for each engine or stage a bundle of resources on some node, an actor in it.

The bundles and actors belong to this process: Ray ends them with it.
"""

import os
import time
from contextlib import suppress
from typing import Any, TypeAlias

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.config.process_configs import PlacementConfig
from headrace.engine_proc.placement.engine_actor import EngineActor, StageActor, node_address
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
STAGES_FLAG = "--distributed-executor-backend ray"
HERE = 0.001  # of the resource that is a node's address: all of it is 1
# Of Ray, where it or the cluster is in trouble.
FAILURES = (RayError, LookupError, RuntimeError, ValueError)
Answer: TypeAlias = "ray.ObjectRef[str]"


class RayCluster:
    """The cluster at an address, or that Ray finds: by RAY_ADDRESS, else one of this machine."""

    def __init__(self, config: PlacementConfig, key: CurveKey) -> None:
        """Join it.

        Raises:
            ConfigError: there is none, or one of another version.
        """
        flag = STAGES_FLAG if config.are_stages else FLAG
        if config.address is None:
            check_reachable(os.environ.get("RAY_ADDRESS", ""), "RAY_ADDRESS")
        else:
            check_reachable(config.address, "--address")
        try:
            ray.init(address=config.address or "auto", log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise ConfigError(
                f"{flag} finds no cluster at {config.address or 'this machine'}; run `ray start "
                "--head` on one machine and `ray start --address=HEAD:6379` on the others and "
                f"here, or give another --address: {plain(error)}"
            ) from None
        except FAILURES as error:
            raise ConfigError(f"{flag} cannot join the cluster: {plain(error)}") from None
        needed = {"CPU": config.num_cpus, "GPU": config.num_gpus}
        self._resources = {name: count for name, count in needed.items() if count}
        self._flags = config.flags
        self._actor_class: Any = StageActor if config.are_stages else EngineActor
        self._bundles = {name: i for i, name in enumerate(config.seats, 1)}  # of stages
        self._are_stages = config.are_stages
        self._key = key
        self._groups: dict[str, PlacementGroup] = {}
        self._actors: dict[str, Any] = {}
        self._starts: dict[str, Answer] = {}  # by name: calls that have not been answered
        self._watches: dict[str, Answer] = {}
        self._failures: dict[str, str] = {}  # why calls could not be made

    def start(self, name: str) -> None:
        """Start an engine, as soon as a node has room for it.

        Where the cluster cannot be asked, `poll` tells that the engine has ended.
        """
        try:
            self._start(name)
        except FAILURES as error:
            self._failures[name] = f"cannot be started: {plain(error)}"

    def _start(self, name: str) -> None:
        group, bundle = self._place_of(name)
        actor_class = ray.remote(self._actor_class).options(
            num_cpus=self._resources["CPU"],
            num_gpus=self._resources.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        )
        actor = self._actors[name] = actor_class.remote()
        self._starts[name] = actor.start.remote(code_version(), self._flags, self._key.secret)

    def _place_of(self, name: str) -> tuple[PlacementGroup, int]:
        """Return the placement group of an engine or a stage, and its bundle there.

        An engine has a group of its own. All stages have one, each on a node of its own. Its first
        bundle is of this node, which has the first stage.
        """
        if not self._are_stages:
            if name not in self._groups:
                self._groups[name] = placement_group([self._resources], strategy="STRICT_PACK")
            return self._groups[name], 0
        if not self._groups:
            bundles = [{f"node:{node_address()}": HERE}, *[self._resources] * len(self._bundles)]
            group = placement_group(bundles, strategy="STRICT_SPREAD")
            self._groups = dict.fromkeys(self._bundles, group)
        return self._groups[name], self._bundles[name]

    def watch(self, name: str) -> None:
        """Ask for the end of an engine that has started."""
        try:
            self._watches[name] = self._actors[name].wait.remote()
        except FAILURES as error:
            self._failures[name] = f"cannot be watched: {plain(error)}"

    def poll(self, name: str) -> Outcome | None:
        """Return the answer to the last question; None is not yet."""
        if name in self._failures:
            return EngineEnded(self._failures.pop(name))
        calls = self._starts if name in self._starts else self._watches
        if not ray.wait([calls[name]], timeout=0)[0]:
            return None
        try:
            answer = ray.get(calls.pop(name))
        except RayTaskError as error:
            return EngineEnded(plain(error.cause))
        except ActorUnavailableError:
            return NodeUnreachable()
        except RayError as error:
            return EngineEnded(why_lost(str(error), self._node_of(name)))
        return EngineStarted(answer) if calls is self._starts else EngineEnded(answer)

    def end(self, name: str) -> None:
        """End the actor of an engine, and with it what it has started."""
        for answers in (self._starts, self._watches, self._failures):
            answers.pop(name, None)
        actor = self._actors.pop(name, None)
        if actor is not None:
            with suppress(*FAILURES):  # it has ended, or does with its node or this process
                ray.kill(actor)

    def leave(self, name: str) -> None:
        """End the actor of an engine, and free what its group has reserved."""
        self.end(name)
        group = self._groups.pop(name, None)
        if group is not None:
            with suppress(*FAILURES):  # it goes with this process otherwise
                remove_placement_group(group)

    def _node_of(self, name: str) -> str:
        """Return the address of the node that has the bundle of an engine, or had it last."""
        with suppress(*FAILURES):  # the cluster may be in trouble just now
            group, bundle = self._place_of(name)
            nodes = placement_group_table(group)["bundles_to_node_id"]
            for node in ray.nodes():
                if node["NodeID"] == nodes[bundle]:
                    return str(node["NodeManagerAddress"])
        return "its node"

    def shortage(self, name: str) -> str:
        """Return what an engine lacks that has no room; "" where it has, and starts.

        It is "", too, where the cluster cannot tell.
        """
        try:
            return self._shortage(name)
        except FAILURES:
            return ""

    def _shortage(self, name: str) -> str:
        if placement_group_table(self._groups[name])["state"] == "CREATED":
            return ""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        free = ray.available_resources()
        have = "; ".join(
            f"{kind}s: {', '.join(f'{node.get(kind, 0):g}' for node in nodes)}, of which "
            f"{free.get(kind, 0):g} are free"
            for kind in self._resources
        )
        takes = " and ".join(f"{count} {kind}s" for kind, count in self._resources.items())
        where = "a node of its own, not the server's" if self._are_stages else "one node"
        lower = "--pp" if self._are_stages else "--data-parallel-size"
        return (
            f"waits for {takes} of {where}, and the nodes have {have}; add a node, or lower {lower}"
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
