"""The session of a gateway: which peer has the engine, until when, for which sequences. Pure."""

from collections.abc import Iterable

from headrace.ipc.aborted_ids import AbortedIds
from headrace.ipc.messages import (
    NOT_FINISHED,
    Abort,
    FinishReason,
    GenerateRequest,
    StepOutput,
    StopSequence,
    ToEngine,
    request_of,
)
from headrace.ipc.remote_messages import LEASE_S, Grant, SessionState

LEASE_NS = round(LEASE_S * 1e9)
OF_REQUESTS = (FinishReason.ABORT, FinishReason.REFUSED)  # ends of all their sequences


class Session:
    """One session. Times are of one clock, in ns."""

    def __init__(self, peer: bytes, grant: Grant, now: int) -> None:
        self.peer = peer
        self.id = grant.session
        self.engine = grant.engine
        self.starts = grant.starts
        self.state = SessionState.WAITING
        self.num_tokens = 0  # of prompts, sent to the engine
        self.clock_ahead = 0  # of the server's clock
        self.is_clock_known = False
        self._work: list[int] = []
        self.granted_at = 0
        self._until = now
        self._open: set[int] = set()  # sequences
        self._ended = AbortedIds()  # requests; the engine drops what comes of them later
        self._outlets: dict[int, bytes] = {}  # peers, by the detokenizer that each one is,
        self._coming: dict[int, bytes] = {}  # and those that become it
        self._has_aborted = False  # since the last request
        self.renew(grant, now)

    def renew(self, grant: Grant, now: int) -> None:
        """Take a grant: it counts from when it was sent, as far as that is known."""
        self.granted_at = grant.sent_at
        self.starts = grant.starts
        sent_at = now
        if grant.clock_ahead is not None:
            self.clock_ahead, self.is_clock_known = grant.clock_ahead, True
            sent_at = min(now, grant.sent_at - grant.clock_ahead)
        self._until = max(self._until, sent_at + LEASE_NS)

    def has_lapsed(self, now: int) -> bool:
        """Whether the engine has no time left."""
        return now > self._until

    @property
    def serves(self) -> bool:
        """Whether the peer has the engine."""
        return self.state == SessionState.SERVING

    def differs(self, work: list[int]) -> bool:
        """Whether the engine's fields are others than at the last call."""
        before, self._work = self._work, work
        return before != work

    def attach(self, detokenizer: int, peer: bytes) -> None:
        """Have steps for a detokenizer go to a peer of its own, once no sequence is open.

        So no step of a sequence overtakes one that has gone by the seat. The end of an aborted one
        may be on its way: the next request does not change the way yet.
        """
        self._coming[detokenizer] = peer

    def outlet(self, detokenizer: int) -> bytes:
        """Return the peer that steps for a detokenizer go to."""
        return self._outlets.get(detokenizer, self.peer)

    def sent(self, message: ToEngine, num_bytes: int) -> None:
        """Note a message to the engine, with the bytes of its frame."""
        match message:
            case GenerateRequest(id):
                if not self._open and not self._has_aborted:
                    self._outlets |= self._coming
                    self._coming.clear()
                self._has_aborted = False
                if request_of(id) not in self._ended:
                    self._open.add(id)
                self.num_tokens += num_bytes // 4
            case StopSequence(id):
                self._open.discard(id)
            case Abort(request):
                self._forget([request])
                self._has_aborted = True
            case _:
                pass

    def came(self, output: StepOutput) -> None:
        """Note what the engine has sent."""
        gone = set(output.failed)
        for id, end in zip(memoryview(output.ids).cast("Q"), output.finished, strict=True):
            if end != NOT_FINISHED:
                self._open.discard(id)
            if end in OF_REQUESTS:  # no other of its sequences is named
                gone.add(request_of(id))
        if gone:
            self._forget(gone)

    def _forget(self, requests: Iterable[int]) -> None:
        gone = set(requests)
        for request in gone:
            self._ended.add(request)
        self._open = {id for id in self._open if request_of(id) not in gone}

    @property
    def requests(self) -> set[int]:
        """The requests that the engine may have."""
        return {request_of(id) for id in self._open}
