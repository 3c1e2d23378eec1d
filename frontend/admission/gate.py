"""The gate of a frontend: authentication, and admission by the numbers on the board."""

from collections.abc import Sequence
from operator import mul

from headrace.board.board import Board, Slot
from headrace.board.fields import EngineField, FrontendField, Seating
from headrace.frontend.admission.admission import MAX_REQUESTS, MAX_TOKENS, Admission, Load
from headrace.frontend.admission.api_key_auth import ApiKeyAuth
from headrace.frontend.http.conformance import body_fault
from headrace.frontend.http.rejections import STOPPING, UNAUTHORIZED, Rejection, too_large
from headrace.frontend.http.request_head import RequestHead

POST = "POST"
LIMITS = {MAX_REQUESTS: FrontendField.REQUEST_OVERLOADS, MAX_TOKENS: FrontendField.TOKEN_OVERLOADS}


class Gate:
    """Admits or rejects requests."""

    def __init__(
        self,
        key_auth: ApiKeyAuth,
        admission: Admission,
        max_body_bytes: int,
        board: Board,
        slot: Slot,
        max_num_requests: Sequence[int] = (),
    ) -> None:
        """Admit all that `admission` does.

        Args:
            max_num_requests: open in each engine, by model; their sum over the engines is a limit.
        """
        self._key_auth = key_auth
        self._admission = admission
        self._max_body_bytes = max_body_bytes
        self._slot = slot
        self.is_closed = False  # the server stops when all is answered
        self._frontends = list(board.of("frontend"))
        self._board = board
        self._engines = list(board.of("engine"))
        self._max_num_requests = max_num_requests

    def enter(
        self, method: str, head: RequestHead, has_admin_key: bool = False
    ) -> Rejection | None:
        """Let a request in, or return why not; all that is known of it is its head."""
        if not has_admin_key and not self._key_auth.admits(head.key):
            self._slot.add(FrontendField.UNAUTHORIZED)
            return UNAUTHORIZED
        fault = body_fault(method, head)
        if fault is not None:
            return fault
        if self.is_closed and method == POST:
            return STOPPING
        if head.length > self._max_body_bytes:
            return too_large(self._max_body_bytes)
        if method != POST:  # what there is to know must be known under load, too
            return None
        return self._refuse(head.length)

    def refuse_late(self, method: str, length: int) -> Rejection | None:
        """Return why a request cannot go on whose body took its time to come, or None.

        An arriving body takes no place: bodies may be slow on purpose.
        """
        return self._refuse(length) if method == POST else None

    def _refuse(self, length: int) -> Rejection | None:
        """Return why there is no room for a request with a body of `length` bytes, or None."""
        rejection = self._admission.refuse(self._load(), length)
        if rejection is not None:
            self._slot.add(FrontendField.OVERLOADS)
            if rejection.limit in LIMITS:
                self._slot.add(LIMITS[rejection.limit])
        return rejection

    def refuse_more(self, size: int) -> Rejection | None:
        """Return why a body of which `size` bytes have come is not read on, or None.

        What it will come to may not have been declared, and others have grown meanwhile.
        """
        rejection = self._admission.refuse_body(self._num_body_bytes - size, size)
        if rejection is not None:
            self._slot.add(FrontendField.OVERLOADS)
        return rejection

    @property
    def retry_after_s(self) -> int:
        """In how many seconds half of what waits in the engine will be done."""
        return self._admission.requests.seconds_for(self._total(EngineField.WAITING) // 2)

    def observe(self, now: float) -> None:
        """Sample the drain rate; called periodically."""
        self._admission.requests.observe(self._total(EngineField.FINISHED), now)
        self._admission.tokens.observe(self._total(EngineField.COMPUTED_TOKENS), now)

    def _load(self) -> Load:
        return Load(
            num_requests=sum([slot[FrontendField.ADMITTED] for slot in self._frontends]),
            num_waiting_tokens=sum(
                [slot[EngineField.WAITING_TOKENS] for slot in self._board.seated_engines]
            ),
            num_body_bytes=self._num_body_bytes,
            max_num_requests=self._num_places,
        )

    @property
    def _num_places(self) -> int:
        """How many requests may be open: as many as all engines take.

        For a model without an engine as many wait as one would take.
        """
        counts = [0] * len(self._max_num_requests)
        if not counts:
            return 0
        for slot in self._board.seated_engines:
            counts[slot[EngineField.MODEL]] += slot[EngineField.SEATING] != Seating.VACANT
        return sum(map(mul, self._max_num_requests, [count or 1 for count in counts]))

    def _total(self, field: EngineField) -> int:
        """Return the sum of what the engines count."""
        return sum([slot[field] for slot in self._engines])

    @property
    def _num_body_bytes(self) -> int:
        """Bytes of bodies in all frontends."""
        return sum(
            [
                slot[FrontendField.HELD_BYTES] + slot[FrontendField.KEPT_BYTES]
                for slot in self._frontends
            ]
        )
