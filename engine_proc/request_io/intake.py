"""Admission of requests to the engine, and detection of those that lost their client. Pure.

Messages of one request come from several senders, so an abort may arrive before its request.
"""

import enum
import logging
from collections.abc import Iterable, Sequence

from headrace.engine_proc.request_io.leases import LEASE_S, Leases
from headrace.ipc.aborted_ids import AbortedIds
from headrace.ipc.messages import MAX_STARTS, frontend_of, request_of, start_of

LAPSE_S = 1.0  # between looks at the leases

log = logging.getLogger(__name__)


class IntakeDecision(enum.Enum):
    """The decision on a sequence that arrives."""

    TAKEN = enum.auto()
    REFUSED = enum.auto()  # with all others of its request, of which this is the first
    DROPPED = enum.auto()  # its request has been aborted or refused


class Intake:
    """Admits requests, and finds those to abort. Times are of one clock, in seconds."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._leases = Leases(lease_s)
        self._looked_at = float("-inf")
        self._aborted = AbortedIds()

    def judge(self, sequence: int, is_full: bool) -> IntakeDecision:
        """Decide on a sequence; its first one decides for its request, which a full queue rejects
        whole."""
        request = request_of(sequence)
        if request in self._aborted:
            return IntakeDecision.DROPPED
        if sequence == request and is_full:
            self.drop(request)
            return IntakeDecision.REFUSED
        return IntakeDecision.TAKEN

    def drop(self, request: int) -> None:
        """Reject the sequences of a request that arrive from now on."""
        self._aborted.add(request)

    def renew(self, requests: Iterable[int], now: float) -> None:
        """Renew the leases of `requests`."""
        self._leases.renew(requests, now)

    def expired(self, requests: Iterable[int], now: float, starts: Sequence[int] = ()) -> list[int]:
        """Return the engine's `requests` to abort. Checks them once in `LAPSE_S` at most.

        Args:
            starts: processes started so far in each frontend's seat. Requests of a replaced
                frontend are aborted.
        """
        if now - self._looked_at < LAPSE_S:
            return []
        self._looked_at = now
        orphans: list[int] = []
        others: list[int] = []
        for request in requests:
            (orphans if is_orphan(request, starts) else others).append(request)
        expired = self._leases.expired(others, now)
        for request in expired:
            log.warning("no frontend waits for request %x any more: aborting it", request)
        return orphans + expired


def is_orphan(request: int, starts: Sequence[int]) -> bool:
    """Whether the process that sent a request has been replaced."""
    frontend = frontend_of(request)
    return frontend < len(starts) and start_of(request) != starts[frontend] % MAX_STARTS
