"""A Ray cluster: for each engine a bundle of resources on some node, and an actor in it.

The bundles and actors belong to this process: Ray ends them with it.
"""

import os
import re
import socket
import time
from contextlib import suppress
from typing import Any, TypeAlias

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.config.process_configs import PlacementConfig
from headrace.engine_proc.placement.engine_actor import EngineActor
from headrace.engine_proc.placement.placed_engine import Ended, Outcome, Started, Unreachable
from headrace.errors import ConfigError
from headrace.ipc.curve_key import CurveKey
from headrace.ipc.schema_fingerprint import code_version

Answer: TypeAlias = "ray.ObjectRef[str]"
CONNECT_S = 5.0
FLAG = "--data-parallel-backend ray"
NO_CODE = re.compile(r"No module named '(headrace[\w.]*)'")
CAUSE = re.compile(r"The actor (?:is dead|died) because (?:of )?(.*?)(?:\. Worker exit|\.?\n|$)")


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
            return Ended(str(error.cause))
        except ActorUnavailableError:
            return Unreachable()
        except RayError as error:
            return Ended(why_of(error, self._node_of(engine)))
        return Started(answer) if calls is self._starts else Ended(answer)

    def end(self, engine: int) -> None:
        """End the actor of an engine, and with it what it has started."""
        with suppress(RayActorError):
            ray.kill(self._actors.pop(engine))

    def _node_of(self, engine: int) -> str:
        """Return the address of the node that has the bundle of an engine, or had it last."""
        nodes = placement_group_table(self._groups[engine])["bundles_to_node_id"]
        found = [node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == nodes[0]]
        return found[0] if found else "its node"

    def shortage(self, engine: int) -> str:
        """Return what an engine lacks that has no room; "" where it has, and starts."""
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


def check_reachable(where: str) -> None:
    """Refuse an address of a cluster at which nothing listens: Ray tries for minutes.

    Raises:
        ConfigError: it is such a one. Others than HOST:PORT are left to Ray.
    """
    host, _, port = where.rpartition(":")
    if not port.isdecimal() or "//" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"RAY_ADDRESS {where} cannot be reached: {error}; run `ray start --head` there"
        ) from None


def why_of(error: Exception, node: str) -> str:
    """Return why an actor has ended, in one line."""
    text = str(error)
    lack = NO_CODE.search(text)
    if lack is not None:
        return f"cannot run on {node}: no module {lack[1]}; install the server's headrace there"
    cause = CAUSE.search(text)
    return f"is lost with its actor on {node}: {plain(cause[1] if cause else text)}"


def plain(what: object) -> str:
    """Return a text in one line."""
    return " ".join(str(what).split())
