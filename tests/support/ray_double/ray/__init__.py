"""Stands for Ray where that is not installed: a cluster of this machine alone.

An actor is an object with a thread, and what it starts are processes of this machine. It has what
`engine_proc/placement` uses, and nothing else.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

from ray import util
from ray.exceptions import RayTaskError

NODE = {
    "NodeID": "here",
    "NodeManagerAddress": util.get_node_ip_address(),
    "Resources": {"CPU": 8.0},
    "Alive": True,
}
__all__ = ["util"]


class Method:
    """A method of an actor."""

    def __init__(self, actor: "Actor", name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: Any) -> "Future[Any]":
        """Call it in the actor's thread."""
        return self._actor.thread.submit(getattr(self._actor.instance, self._name), *args)


class Actor:
    """An object and its thread: the kernel ends the object's children with the thread."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self.thread = ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class ActorClass:
    """A class whose objects are actors."""

    def __init__(self, cls: type[Any]) -> None:
        self._cls = cls

    def options(self, **_: Any) -> "ActorClass":
        """Take what actors need."""
        return self

    def remote(self) -> Actor:
        """Make an actor."""
        return Actor(self._cls())


def init(**_: Any) -> None:
    """Join the cluster."""


def remote(cls: type[Any]) -> ActorClass:
    """Make the objects of a class actors."""
    return ActorClass(cls)


def wait(calls: Sequence["Future[Any]"], timeout: float) -> tuple[list[Any], list[Any]]:
    """Wait for one of several calls."""
    done, others = wait_for(calls, timeout, "FIRST_COMPLETED")
    return list(done), list(others)


def get(call: "Future[Any]") -> Any:
    """Return the answer to a call."""
    try:
        return call.result()
    except Exception as error:
        raise RayTaskError(error) from error


def kill(actor: Actor) -> None:
    """End an actor, and with it its child."""
    child = getattr(actor.instance, "_child", None)
    if child is not None:
        child.kill()
    actor.thread.shutdown()


def nodes() -> list[dict[str, Any]]:
    """Return all nodes."""
    return [NODE]


def available_resources() -> dict[str, float]:
    """Return what is free."""
    return {"CPU": 8.0}


def shutdown() -> None:
    """Leave the cluster; what was started ends with this process."""
