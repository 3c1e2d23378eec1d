"""An engine on some node of a cluster. Pure: the cluster and the time are passed in."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, assert_never

from headrace.supervision.restart_backoff import RestartBackoff

RETRY_S = 0.5  # between questions to a node that is unreachable
ROOM_S = 5.0  # until a start that has no answer is told of
STEADY_S = 30.0  # an engine that has lived so long has worked

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStarted:
    """An engine listens at an address."""

    where: str


@dataclass(frozen=True)
class EngineEnded:
    """There is no engine, or none any more."""

    why: str


@dataclass(frozen=True)
class NodeUnreachable:
    """The node cannot be heard; what it runs may go on."""


Outcome = EngineStarted | EngineEnded | NodeUnreachable


class Cluster(Protocol):
    """Nodes that have room for engines. Of each engine one question is open at most."""

    def start(self, engine: int) -> None:
        """Start an engine, as soon as there is room for it."""

    def watch(self, engine: int) -> None:
        """Ask for the end of an engine that has started."""

    def poll(self, engine: int) -> Outcome | None:
        """Return the answer to the last question; None is not yet."""

    def end(self, engine: int) -> None:
        """End what has started of an engine."""

    def shortage(self, engine: int) -> str:
        """Return what an engine lacks that has no room; "" where it has, and starts."""


class PlacedEngine:
    """One engine: it starts, is watched, and another one starts after it.

    Args:
        publish: is told its address, or None.
    """

    def __init__(self, index: int, cluster: Cluster, publish: Callable[[str | None], None]) -> None:
        self._index = index
        self._cluster = cluster
        self._publish = publish
        self._backoff = RestartBackoff()
        self._ask_at: float | None = 0.0  # None: an answer is due
        self._since = 0.0
        self._where: str | None = None
        self._told = ""

    @property
    def is_placed(self) -> bool:
        """Whether it is on a node, as far as is known."""
        return self._where is not None

    def look(self, now: float) -> None:
        """Take the next step, if it is due. `now` are seconds that never go back."""
        if self._ask_at is not None:
            if now >= self._ask_at:
                self._ask(now)
            return
        outcome = self._cluster.poll(self._index)
        match outcome:
            case None:
                if self._where is None and now >= self._since + ROOM_S:
                    self._tell(self._cluster.shortage(self._index))
            case EngineStarted(where):
                self._where = where
                self._publish(where)
                self._ask(now)
            case NodeUnreachable():
                if self._where is None:
                    self._fail("cannot be started: its node is unreachable", now)
                else:
                    self._ask_at = now + RETRY_S
            case EngineEnded(why):
                self._fail(why, now)
            case _:
                assert_never(outcome)

    def _ask(self, now: float) -> None:
        """Start an engine, or watch the one that there is."""
        self._ask_at = None
        if self._where is None:
            self._since = now
            self._cluster.start(self._index)
        else:
            self._cluster.watch(self._index)

    def _fail(self, why: str, now: float) -> None:
        """Give an engine up. Another one starts later."""
        if self._where is not None and now >= self._since + STEADY_S:
            self._backoff.worked()
            self._told = ""
        self._tell(f"{why}; starting another")
        self._publish(None)
        self._where = None
        self._cluster.end(self._index)
        self._ask_at = now + self._backoff.patient_delay_s()

    def _tell(self, what: str) -> None:
        """Log what is wrong, once."""
        if what and what != self._told:
            log.warning("engine %d %s", self._index, what)
            self._told = what
