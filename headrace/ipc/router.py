"""Routing of a frontend: bodies to the least busy tokenizer, aborts there and to the engines.

Long bodies have a tokenizer of their own, so short requests never wait behind one. Requests with
images and GETs use the last one. A word in the body marks a request with images; nothing else in
it is read.
Nothing here waits. The sender answers a body that a full link refuses. An abort that it refuses is
kept and sent again, since a lost one leaves the ring working in vain. The requests of a process
that died are sent again when its seat is taken.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from headrace.board.backlog import tokenizer_backlog
from headrace.board.board import Board, Seat, Slot, State
from headrace.board.fields import CommonField, DetokenizerField, FrontendField, TokenizerField
from headrace.board.replacements import ReplacementWatch
from headrace.ipc.engine_links import EngineLinks
from headrace.ipc.inflight import InflightRequest, InflightRequests, R
from headrace.ipc.messages import Abort, HttpRequest, RenewLeases
from headrace.ipc.sockets import Outbox, address
from headrace.routes import ANTHROPIC_PATHS, READS

RENEW_S = 1.0  # the engine keeps what is not renewed ten times as long
LONG_BODY_BYTES = 64 << 10  # some 16,000 tokens, encoded in 5 ms
HUGE_BODY_BYTES = 512 << 10  # some may take 0.2 s to parse: a process of their own does
MAX_LONG_BACKLOG_BYTES = 512 << 20  # of long bodies that wait; more are refused
# In every body with images, and in few others.
IMAGE_MARKS = (b'"image_url"', b'"video_url"')
ANTHROPIC_MARKS = (b'"image"',)  # a block's type, where images are written Anthropic's way


class Router:
    """The outgoing links of one frontend."""

    def __init__(
        self,
        run_dir: str,
        num_tokenizers: int,
        board: Board,
        slot: Slot,
        handles_gets: bool = True,
    ) -> None:
        """Connect to `num_tokenizers` for short bodies, those for others, and the engines.

        Args:
            handles_gets: the last tokenizer does; else no GET is forwarded.
        """
        self._tokenizer_slots = list(board.of("tokenizer"))
        num_all = len(self._tokenizer_slots)
        self._tokenizers = [Outbox(address(run_dir, "tokenizer", i)) for i in range(num_all)]
        self._short = range(num_tokenizers)
        self._long = num_tokenizers
        self._about = num_all - 1  # answers GETs
        # Empty where the model takes none.
        self._images = range(num_tokenizers + 1, num_all - handles_gets)
        self._engines = EngineLinks(run_dir, board)
        self._engine_aborts: dict[int, deque[Abort]] = {}
        self._backlogs = [tokenizer_backlog(board, i) for i in range(num_all)]
        self._detokenizer_slots = list(board.of("detokenizer"))
        self._num_detokenizers = len(self._detokenizer_slots)
        self._watch = ReplacementWatch(board, ("tokenizer", "engine", "detokenizer"))
        self._are_unsent = False  # requests that are to be sent again
        self._slot = slot
        self._tokenizer_aborts = [
            (Outbox(address(run_dir, "aborts", i)), deque[Abort]()) for i in range(num_all)
        ]
        self._renewed_at = 0.0

    def backlog(self, tokenizer: int) -> int:
        """Return how many bytes of bodies a tokenizer has been sent and not handled."""
        return self._backlogs[tokenizer]()

    @property
    def is_behind(self) -> bool:
        """Whether a tokenizer has bodies to handle."""
        return any(self.backlog(tokenizer) > 0 for tokenizer in range(self._about))

    def long_backlog(self) -> int:
        """Return how many bytes of long bodies and of such with images have still to be handled."""
        return sum([self.backlog(tokenizer) for tokenizer in (self._long, *self._images)])

    def forward(self, sent: InflightRequest) -> bool:
        """Give a request to the least busy tokenizer; False, and not given, where that is full.

        It goes with others at the next `flush`: to wake a process costs more than a short request.
        """
        body = sent.body
        target = min(self._lane(sent.request, body), key=self._business)
        if target >= self._long and self.backlog(target) >= MAX_LONG_BACKLOG_BYTES:
            return False
        counter, num_bytes = (
            FrontendField.FORWARDED_BYTES + target,
            len(body) + 1,
        )  # none is work, too
        self._slot.add(counter, num_bytes)  # first: it may be handled before this goes on
        if not self._tokenizers[target].try_put(sent.request, body):
            self._slot.add(counter, -num_bytes)
            return False
        self._slot.add(FrontendField.FORWARDED, target != self._about)
        sent.tokenizer = target
        return True

    def _lane(self, request: HttpRequest, body: bytes) -> Sequence[int]:
        """Return the tokenizers that may get a body."""
        if request.method in READS:
            return (self._about,)
        marks = ANTHROPIC_MARKS if request.path.startswith(ANTHROPIC_PATHS) else IMAGE_MARKS
        if self._images and any(mark in body for mark in marks):
            return self._images
        return self._short if len(body) < LONG_BODY_BYTES else (self._long,)

    def _business(self, tokenizer: int) -> tuple[bool, int]:
        """Return the sort key of a tokenizer's load; the least loaded one is chosen."""
        is_ready = self._tokenizer_slots[tokenizer][CommonField.STATE] == State.READY
        return not is_ready, self.backlog(tokenizer)

    def resend(
        self, requests: InflightRequests[R], give_up: Callable[[InflightRequest], None]
    ) -> None:
        """Send again the requests of processes replaced since the last call.

        Args:
            requests: all of this sender.
            give_up: as in `InflightRequests.replace`.
        """
        for seat in self._watch.replaced():
            in_progress = self._in_progress(seat)
            for id, tokenizer, engine, is_given_up in requests.replace(
                seat, in_progress, self._num_detokenizers, give_up
            ):
                self._withdraw(id, tokenizer)
                if is_given_up or (engine < 0 and len(self._engines.present) > 1):
                    self._abort_in_engines(id)
            self._are_unsent = True
        if self._are_unsent:
            unsent = [sent for sent in requests.incomplete() if sent.tokenizer < 0]
            self._are_unsent = not all([self.forward(sent) for sent in unsent])
            self.flush()

    def _in_progress(self, seat: Seat) -> int:
        """Return at which request the process died that was in a seat, where that is known."""
        match seat.role:
            case "tokenizer":
                return self._tokenizer_slots[seat.index][TokenizerField.AT_HAND]
            case "detokenizer":
                return self._detokenizer_slots[seat.index][DetokenizerField.LAST_RESPONSE_AT_HAND]
            case _:
                return 0

    def abort(self, sent: InflightRequest) -> None:
        """Have the engines forget a request, now or as soon as the links take it.

        So does the tokenizer that may still have it. All engines are told: to one that does not
        have it, an abort says nothing.
        """
        self._abort_in_engines(sent.request.id)
        self._withdraw(sent.request.id, sent.tokenizer if sent.is_with_tokenizer else -1)
        self.flush()

    def _abort_in_engines(self, id: int) -> None:
        for engine in self._engines.present:
            self._engine_aborts.setdefault(engine, deque()).append(Abort(id))

    def _withdraw(self, id: int, tokenizer: int) -> None:
        """Have the tokenizer that may be at a request let it be; -1 is none."""
        if tokenizer >= 0:
            self._tokenizer_aborts[tokenizer][1].append(Abort(id))

    def renew(self, requests: Iterable[int]) -> None:
        """Renew the leases of open requests at the engines, periodically."""
        now = time.monotonic()
        if now - self._renewed_at < RENEW_S:
            return
        present = self._engines.present
        for engine in self._engine_aborts.keys() - present:
            del self._engine_aborts[engine]
        ids = array("Q", requests)
        data = ids.tobytes()
        if not ids or all([self._engines[one].try_send(RenewLeases(), data) for one in present]):
            self._renewed_at = now

    def flush(self) -> None:
        """Send forwarded requests, and pending aborts."""
        for tokenizer in self._tokenizers:
            tokenizer.flush()
        for outbox, aborts in self._tokenizer_aborts:
            send_some(outbox, aborts)
        for engine, aborts in self._engine_aborts.items():
            send_some(self._engines[engine], aborts)

    def close(self) -> None:
        """Drop all links."""
        for outbox in self._tokenizers:
            outbox.close()
        for outbox, _ in self._tokenizer_aborts:
            outbox.close()
        self._engines.close()


def send_some(outbox: Outbox, aborts: deque[Abort]) -> None:
    """Send as many aborts as a link takes."""
    while aborts and outbox.try_send(aborts[0]):
        aborts.popleft()
