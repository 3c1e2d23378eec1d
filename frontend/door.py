"""The door: API keys first, then whether there is room. The board says how much there is to do."""

from headrace.board import Board, Field, Slot
from headrace.frontend.admission import Admission, Load
from headrace.frontend.keyring import Keyring
from headrace.frontend.refusals import UNAUTHORIZED, Refusal
from headrace.frontend.request_head import RequestHead
from headrace.links import Links


class Door:
    """Lets requests in, or says why not."""

    def __init__(
        self, keyring: Keyring, admission: Admission, board: Board, slot: Slot, links: Links
    ) -> None:
        self._keyring = keyring
        self._admission = admission
        self._slot = slot
        self._links = links
        self._frontends = list(board.of("frontend"))
        self._engine = board.slot("engine")

    def refuse(self, method: str, head: RequestHead) -> Refusal | None:
        """Return why a request is not let in, or None."""
        if not self._keyring.admits(head.authorization):
            self._slot.add(Field.UNAUTHORIZED)
            return UNAUTHORIZED
        if method != "POST":  # what there is to know must be known under load, too
            return None
        refusal = self._admission.refuse(self._load(), head.length)
        if refusal is not None:
            self._slot.add(Field.OVERLOADS)
        return refusal

    def observe(self, now: float) -> None:
        """Look at how fast work gets done; now and then."""
        self._admission.requests.observe(self._engine[Field.FINISHED], now)
        self._admission.tokens.observe(self._engine[Field.COMPUTED_TOKENS], now)

    def _load(self) -> Load:
        held = sum(slot[Field.HELD_BYTES] for slot in self._frontends)
        return Load(
            num_requests=sum(slot[Field.OPEN_REQUESTS] for slot in self._frontends),
            num_waiting_tokens=self._engine[Field.WAITING_TOKENS],
            num_body_bytes=held + self._links.total_backlog(),
        )
