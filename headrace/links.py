"""Where a frontend sends: bodies to the tokenizer with the least to do, aborts to the engine.

Long bodies have a tokenizer of their own, the last: who asks for little never waits behind one.
Nothing here waits. What a full link refuses is the sender's to answer (bodies) or is kept and sent
again (aborts: losing one would leave the engine working for nobody).
"""

import time
from array import array
from collections import deque
from collections.abc import Iterable

from headrace.board import Board, Field, Slot
from headrace.messages import Abort, HttpRequest, Renew
from headrace.sockets import Outbox, address

RENEW_S = 1.0  # the engine keeps what is not renewed ten times as long
LONG_BODY_BYTES = 64 << 10  # some 16,000 tokens, encoded in 5 ms
MAX_LONG_BACKLOG_BYTES = 512 << 20  # of long bodies that wait; more are refused


class Links:
    """The outgoing links of one frontend."""

    def __init__(self, run_dir: str, num_tokenizers: int, board: Board, slot: Slot) -> None:
        """Connect to `num_tokenizers` for short bodies, the one for long ones, and the engine."""
        self._tokenizers = [
            Outbox(address(run_dir, "tokenizer", i)) for i in range(num_tokenizers + 1)
        ]
        self._long = num_tokenizers
        self._engine = Outbox(address(run_dir, "engine"))
        self._frontend_slots = list(board.of("frontend"))
        self._tokenizer_slots = list(board.of("tokenizer"))
        self._slot = slot
        self._aborts: deque[Abort] = deque()
        self._renewed_at = 0.0

    def backlog(self, tokenizer: int) -> int:
        """Return how many bytes of bodies a tokenizer has been sent and not handled."""
        sent = sum([s[Field.FORWARDED_BYTES + tokenizer] for s in self._frontend_slots])
        return sent - self._tokenizer_slots[tokenizer][Field.HANDLED_BYTES]

    def long_backlog(self) -> int:
        """Return how many bytes of long bodies have still to be handled."""
        return self.backlog(self._long)

    def total_backlog(self) -> int:
        """Return how many bytes of bodies all tokenizers have still to handle."""
        return sum(map(self.backlog, range(len(self._tokenizers))))

    def forward(self, request: HttpRequest, body: bytes) -> bool:
        """Send a request to the least busy tokenizer; False, and not sent, where that is full."""
        if len(body) < LONG_BODY_BYTES:
            target = min(range(self._long), key=self.backlog)
        elif self.backlog(self._long) < MAX_LONG_BACKLOG_BYTES:
            target = self._long
        else:
            return False
        if not self._tokenizers[target].try_send(request, body):
            return False
        # A request without a body is work too.
        self._slot.add(Field.FORWARDED_BYTES + target, len(body) + 1)
        return True

    def abort(self, request: int) -> None:
        """Have the engine forget a request, now or as soon as the link takes it."""
        self._aborts.append(Abort(request))
        self.flush()

    def renew(self, requests: Iterable[int]) -> None:
        """Tell the engine, now and then, which requests are still waited for."""
        now = time.monotonic()
        if now - self._renewed_at < RENEW_S:
            return
        ids = array("Q", requests)
        if not ids or self._engine.try_send(Renew(), ids.tobytes()):
            self._renewed_at = now

    def flush(self) -> None:
        """Send the aborts that are still to be sent."""
        while self._aborts and self._engine.try_send(self._aborts[0]):
            self._aborts.popleft()

    def close(self) -> None:
        """Drop all links."""
        for outbox in (*self._tokenizers, self._engine):
            outbox.close()
