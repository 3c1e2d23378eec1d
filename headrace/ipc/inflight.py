"""Requests on their way around the ring, with everything needed to send them again. Pure.

The sender of a request keeps its body until the response is complete. After a process has died and
been replaced, its requests are sent again. The ring computes the same text, and sends only what the
client does not have. Senders are the frontends and an `Engine`.
"""

import itertools
from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from headrace.board.board import Seat
from headrace.ipc.messages import (
    MAX_SEQUENCES,
    MORE,
    Head,
    HttpRequest,
    detokenizer_of,
    request_id,
    request_of,
)
from headrace.ipc.sockets import Frame
from headrace.routes import READS

MAX_EARLIER = 16  # ids that are kept: the last ones, and the first, which may have tokens
MAX_BLAMED = 2  # deaths of a process while this request was at hand


@dataclass(eq=False, slots=True)
class InflightRequest:
    """A request, and how much of its answer the client has."""

    request: HttpRequest
    body: bytes
    tokenizer: int = -1  # to which it went; -1 is that it waits to be sent
    num_delivered: dict[int, int] = field(default_factory=dict)  # by sequence, as in `HttpRequest`
    has_response: bool = False  # something has come back since it was sent
    engine: int = -1  # that computes it; -1 is that none is known
    num_blamed: int = 0
    held: list[Frame] = field(default_factory=list)  # of a piece that has not come whole

    def take(self, index: int, data: Frame, last: int, num_delivered: int) -> bool:
        """Take an entry of a sequence's response; return whether it completes a piece.

        The parts of a piece before its last wait in `held`, to be released before the last is used.

        Args:
            last: as in `ResponseFrames`.
            num_delivered: as in `ResponseFrames`.
        """
        self.has_response = True
        if last == MORE:
            self.held.append(bytes(data))
            return False
        self.num_delivered[index] = num_delivered
        return True

    def release(self) -> list[Frame]:
        """Return the parts of a piece that came before its last, and hold none."""
        parts, self.held = self.held, []
        return parts

    @property
    def num_held_bytes(self) -> int:
        """Bytes of the response that wait for the rest of their piece."""
        return sum(map(len, self.held))

    def is_lost_with(self, seat: Seat, num_detokenizers: int) -> bool:
        """Whether the process in a seat may have taken this request with it."""
        match seat.role:
            case "tokenizer":
                return self.tokenizer == seat.index and self.is_with_tokenizer
            case "engine":
                return not self.is_read and self.engine in (-1, seat.index)
            case "detokenizer" if not self.is_read:
                return detokenizer_of(self.request.id, num_detokenizers) == seat.index
            case _:
                return False

    @property
    def is_read(self) -> bool:
        """Whether a tokenizer answers it alone, to the last byte."""
        return self.request.method in READS

    @property
    def is_with_tokenizer(self) -> bool:
        """Whether a tokenizer may be at it."""
        return self.tokenizer >= 0 and (self.is_read or not self.has_response)

    def blame(self, in_progress: int) -> bool:
        """Record that a dead process had this in progress; return whether it is sent once more."""
        self.num_blamed += in_progress == self.request.id
        return self.num_blamed < MAX_BLAMED

    def renew(self, id: int, is_suspect: bool = False, is_response_suspect: bool = False) -> None:
        """Prepare to be sent again under a new id. A suspect stays one."""
        before = self.request
        has_none = self.has_response or not before.resumes
        earlier = [] if has_none else [before.resumes, *before.earlier]
        del earlier[MAX_EARLIER - 1 : -1]
        self.request = msgspec.structs.replace(
            before,
            id=id,
            origin=before.first_id,
            resumes=before.id,
            num_delivered=dict(self.num_delivered),
            is_suspect=is_suspect or before.is_suspect,
            is_response_suspect=is_response_suspect or before.is_response_suspect,
            engine=self.engine,
            earlier=earlier,
        )
        self.tokenizer, self.has_response = -1, False
        self.held.clear()


class ResponseReceiver(Protocol):
    """The sender's record of a request. It takes the response."""

    id: int  # which the request has now
    sent: InflightRequest | None  # once it has been
    head: Head | None
    has_begun: bool  # the head has been handed on; another one is ignored
    complete: bool

    def hold(self, part: Frame) -> None:
        """Take a part of a piece whose last part follows in `deliver`."""

    def deliver(self, data: Frame, last: bool, num_written: int = 0) -> None:
        """Take response bytes.

        Args:
            num_written: how many bytes of their HTTP chunk have been written.
        """


R = TypeVar("R", bound=ResponseReceiver)


class Withdrawal(NamedTuple):
    """An id that is no longer in use, and the processes that may still work at it."""

    id: int
    tokenizer: int  # -1 is none
    engine: int  # -1 is any
    is_given_up: bool  # else the engine that it is sent to again knows that it resumes this one


class InflightRequests(Generic[R]):
    """The requests of one sender, by the ids they have now.

    A response that comes for another id is dropped: its request has ended, or was sent again.
    """

    def __init__(self, frontend: int, first_counter: int = 0) -> None:
        self._frontend = frontend
        self._counter = itertools.count(first_counter + 1)
        self._receivers: dict[int, R] = {}

    def __len__(self) -> int:
        return len(self._receivers)

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._receivers.values()))

    @property
    def ids(self) -> KeysView[int]:
        """The ids that the requests have now."""
        return self._receivers.keys()

    def next_id(self) -> int:
        """Draw an id. Any thread may do so."""
        return request_id(self._frontend, next(self._counter))

    def add(self, receiver: R) -> None:
        """Wait for the response to a request."""
        self._receivers[receiver.id] = receiver

    def remove(self, receiver: R) -> None:
        """Stop waiting, if that has not been done."""
        self._receivers.pop(receiver.id, None)

    def incomplete(self) -> list[InflightRequest]:
        """Return the requests that have been sent and whose responses are incomplete."""
        return [
            receiver.sent
            for receiver in self._receivers.values()
            if receiver.sent is not None and not receiver.complete
        ]

    def receiver_of(self, sent: InflightRequest) -> R:
        """Return the receiver of a request's response."""
        return self._receivers[sent.request.id]

    def renumber(self, receiver: R) -> None:
        """Draw a new id for a request; what comes for the old one is dropped."""
        del self._receivers[receiver.id]
        receiver.id = self.next_id()
        self._receivers[receiver.id] = receiver

    def replace(
        self,
        seat: Seat,
        in_progress: int,
        num_detokenizers: int,
        give_up: Callable[[InflightRequest], None],
    ) -> list[Withdrawal]:
        """Renumber what a process had that died, so that it is unsent again. Return the old ids.

        Args:
            seat: the process's, where another one is now.
            in_progress: the id of the request at which it died, or 0.
            give_up: called with each request at which processes die, which keeps its id.
        """
        withdrawals = []
        for sent in self.incomplete():
            if not sent.is_lost_with(seat, num_detokenizers):
                continue
            tokenizer = sent.tokenizer if sent.is_with_tokenizer else -1
            is_given_up = not sent.blame(in_progress)
            if seat.role == "engine":
                sent.engine = -1
            withdrawals.append(Withdrawal(sent.request.id, tokenizer, sent.engine, is_given_up))
            if is_given_up:
                give_up(sent)
                continue
            receiver = self.receiver_of(sent)
            self.renumber(receiver)
            sent.renew(
                receiver.id,
                is_suspect=seat.role == "tokenizer",
                is_response_suspect=seat.role == "detokenizer" and not in_progress,
            )
        return withdrawals

    def deliver(
        self,
        id: int,
        head: Head | None,
        data: Frame,
        last: int,
        num_delivered: int,
        num_written: int = 0,
        engine: int = -1,
    ) -> None:
        """Hand an entry of `ResponseFrames` to the receiver it is for, by whole pieces."""
        receiver = self._receivers.get(request_of(id))
        if receiver is None:
            return
        if head is not None and not receiver.has_begun:
            receiver.head = head
        sent = receiver.sent
        if sent is not None:
            sent.engine = engine
            if not sent.take(id % MAX_SEQUENCES, data, last, num_delivered):
                return
            if sent.held:
                for part in sent.release():
                    receiver.hold(part)
        receiver.deliver(data, bool(last), num_written)
