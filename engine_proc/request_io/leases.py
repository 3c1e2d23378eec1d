"""Leases: a request runs while its frontend renews its lease. Pure.

An abort is a message, and is lost if the process that would send it dies. A lease that is not
renewed expires, so no request outlives its client for long.
"""

from collections.abc import Iterable

LEASE_S = 10.0  # frontends renew ten times as often


class Leases:
    """The expiry time of each request, by one clock in seconds."""

    def __init__(self, duration_s: float = LEASE_S) -> None:
        self._duration_s = duration_s
        self._until: dict[int, float] = {}
        self._overdue: set[int] = set()  # at the last look

    def renew(self, requests: Iterable[int], now: float) -> None:
        """Renew the leases of `requests`."""
        until = now + self._duration_s
        self._until |= dict.fromkeys(requests, until)

    def expired(self, requests: Iterable[int], now: float) -> list[int]:
        """Return the engine's `requests` whose leases have expired; new requests get a lease.

        A lease expires at the second check in a row that finds it overdue. After the machine was
        suspended, the first check may run before the frontends have renewed. Leases of requests
        that the engine does not have are removed.
        """
        granted = now + self._duration_s
        self._until = {request: self._until.get(request, granted) for request in requests}
        before = self._overdue
        self._overdue = {request for request, until in self._until.items() if until < now}
        return [request for request in self._until if request in before & self._overdue]
