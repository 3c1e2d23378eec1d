"""Leases: a request runs as long as its frontend says that somebody waits for it. Pure.

An abort is a message and may be lost with the process that would have sent it. What is not renewed
lapses, so nothing runs on for nobody.
"""

from collections.abc import Iterable

LEASE_S = 10.0  # frontends renew ten times as often


class Leases:
    """Until when each request may run, by some clock in seconds."""

    def __init__(self, duration_s: float = LEASE_S) -> None:
        self._duration_s = duration_s
        self._until: dict[int, float] = {}
        self._overdue: set[int] = set()  # at the last look

    def renew(self, requests: Iterable[int], now: float) -> None:
        """Note that these are still waited for."""
        until = now + self._duration_s
        self._until |= dict.fromkeys(requests, until)

    def expired(self, requests: Iterable[int], now: float) -> list[int]:
        """Return which of the engine's `requests` nobody waits for; new ones get a lease.

        That is known at the second look at which a lease has run out: where a machine stood still,
        the first may come before those who would have renewed it. Leases of requests that the
        engine does not have are forgotten.
        """
        granted = now + self._duration_s
        self._until = {request: self._until.get(request, granted) for request in requests}
        before = self._overdue
        self._overdue = {request for request, until in self._until.items() if until < now}
        return [request for request in self._until if request in before & self._overdue]
