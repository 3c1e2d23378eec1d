"""Kills processes of a server while it serves."""

import signal
from collections.abc import Iterable

import httpx
import psutil
from servers import RunningServer

OPERATOR = {"Authorization": "Bearer operator"}
KILL_AFTER = (2, 40, 200)  # events that all answers have brought together


class Killer:
    """Kills a process after so many events, or when there is one, and records which."""

    def __init__(
        self,
        server: RunningServer,
        victim: str,
        moments: Iterable[int] = KILL_AFTER,
        how: signal.Signals = signal.SIGKILL,
    ) -> None:
        self._how = how
        self._moments = sorted(moments, reverse=True)
        self._victim = "engine 0" if victim == "engine" else victim
        self._url = f"{server.url}/admin/processes"
        self._num_seen = 0
        self.killed: list[psutil.Process] = []

    def __call__(self) -> None:
        self._num_seen += 1
        if self._moments and self._num_seen >= self._moments[-1]:
            victim = self._find()
            if victim is not None:
                self._moments.pop()
                self.killed.append(victim)
                victim.send_signal(self._how)

    def _find(self) -> psutil.Process | None:
        """Return the victim, if there is one that serves and has not been killed."""
        told = httpx.get(self._url, headers=OPERATOR).json()["processes"]
        (seat,) = (process for process in told if process["process"] == self._victim)
        is_dead = seat["pid"] in [process.pid for process in self.killed]
        return None if is_dead or seat["state"] != "ready" else psutil.Process(seat["pid"])
