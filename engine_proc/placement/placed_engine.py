"""An engine or a stage on some node of a cluster. Pure: cluster and time are passed in."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, assert_never

from headrace.supervision.restart_backoff import RestartBackoff

RETRY_S = 0.5  # between questions to a node that is unreachable
ROOM_S = 5.0  # until a start that has no answer is told of
LACK_S = 30.0  # between looks at what an engine lacks
LISTEN_S = 1800.0  # that a start may take on a node, until the engine listens

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
    """Nodes that have room for engines, or for stages, which are placed in the same way.

    Of each of them, by its name, one question is open at most.
    """

    def start(self, name: str) -> None:
        """Start an engine, as soon as there is room for it."""

    def watch(self, name: str) -> None:
        """Ask for the end of an engine that has started."""

    def poll(self, name: str) -> Outcome | None:
        """Return the answer to the last question; None is not yet."""

    def end(self, name: str) -> None:
        """End what has started of an engine."""

    def leave(self, name: str) -> None:
        """End what has started of an engine, and give up its room."""

    def shortage(self, name: str) -> str:
        """Return what an engine lacks that has no room; "" where it has, and starts."""


class PlacedEngine:
    """One engine: it starts, is watched, and another one starts after it.

    Args:
        name: of its seat, such as "engine 1".
        publish: is told its address, or None.
        serves: whether the server has it ready.
    """

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        publish: Callable[[str | None], None],
        serves: Callable[[], bool],
    ) -> None:
        self._name = name
        self._cluster = cluster
        self._publish = publish
        self._serves = serves
        self._backoff = RestartBackoff()
        self._ask_at: float | None = 0.0  # None: an answer is due
        self._look_at = 0.0  # at what it lacks
        self._listens_by: float | None = None  # where a node has it
        self._lacks = False  # room, which has been told
        self._where: str | None = None
        self._told = ""
        self._is_wanted = False

    @property
    def is_placed(self) -> bool:
        """Whether it is on a node, as far as is known."""
        return self._where is not None

    def look(self, now: float) -> None:
        """Take the next step, if it is due. `now` are seconds that never go back."""
        self._is_wanted = True
        if self._ask_at is not None:
            if now >= self._ask_at:
                self._ask(now)
            return
        if self._where is not None and self._serves():
            self._backoff.worked()
            self._told = ""
        outcome = self._cluster.poll(self._name)
        match outcome:
            case None:
                if self._where is None and now >= self._look_at:
                    self._look_at = now + LACK_S
                    self._check_start(now)
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

    def leave(self) -> None:
        """Have no engine until the next look."""
        if self._is_wanted:
            self._is_wanted = False
            self._forget()
            self._cluster.leave(self._name)

    def renew(self) -> None:
        """End the engine. The next look starts another one in its room."""
        self._forget()
        self._cluster.end(self._name)

    def _forget(self) -> None:
        """Begin anew."""
        self._publish(None)
        self._where, self._ask_at, self._told = None, 0.0, ""
        self._backoff.worked()

    def _ask(self, now: float) -> None:
        """Start an engine, or watch the one that there is."""
        self._ask_at = None
        if self._where is None:
            self._look_at = now + ROOM_S
            self._listens_by = None
            self._lacks = False
            self._cluster.start(self._name)
        else:
            self._cluster.watch(self._name)

    def _check_start(self, now: float) -> None:
        """Tell once why a start takes long; give it up where a node has had it for too long."""
        lack = self._cluster.shortage(self._name)
        if lack:
            self._listens_by = None
            if not self._lacks:
                self._tell(lack)
            self._lacks = True
        elif self._listens_by is None:
            self._listens_by = now + LISTEN_S
            log.info("%s has a node, and does not listen there yet", self._name)
        elif now >= self._listens_by:
            self._fail(f"has a node, and does not listen there after {LISTEN_S:g} s", now)

    def _fail(self, why: str, now: float) -> None:
        """Give an engine up. Another one starts later."""
        self._tell(f"{why}; starting another")
        self._publish(None)
        self._where = None
        self._cluster.end(self._name)
        self._ask_at = now + self._backoff.patient_delay_s()

    def _tell(self, what: str) -> None:
        """Log what is wrong, once."""
        if what and what != self._told:
            log.warning("%s %s", self._name, what)
            self._told = what
