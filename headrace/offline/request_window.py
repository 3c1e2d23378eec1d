"""Requests in flight and their results. Nothing here waits.

The caller passes the pieces in as they come: `Engine` from a queue between threads, `AsyncEngine`
from one of its event loop.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.client.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    EmbeddingList,
    EventParser,
    decode,
    error_of,
    first_text,
)
from headrace.errors import EngineDied
from headrace.offline.ring_connection import Piece, Put, Ring, RingRequest

A = TypeVar("A", bound=Completion | ChatCompletion | EmbeddingList)


@dataclass
class Partial:
    """An answer so far."""

    position: int
    call: RingRequest
    status: int = 200
    body: bytearray = field(default_factory=bytearray)


class RequestWindow(Generic[A]):
    """Many requests, as many in flight as the engine has places."""

    def __init__(self, ring: Ring, put: Put, calls: Iterable[RingRequest], kind: type[A]) -> None:
        self._ring = ring
        self._put = put
        self._calls = enumerate(calls)
        self._kind = kind
        self._next = next(self._calls, None)
        self._out: dict[int, Partial] = {}
        self._num_sequences = 0
        self._responses: dict[int, A] = {}

    def fill(self) -> bool:
        """Send requests while there are places; return whether any are open."""
        while self._next is not None:
            position, call = self._next
            if self._out and self._num_sequences + call.num_sequences > self._ring.places:
                break
            self._out[self._ring.open(call, self._put)] = Partial(position, call)
            self._num_sequences += call.num_sequences
            self._next = next(self._calls, None)
        return bool(self._out)

    def take(self, piece: Piece | EngineDied) -> A | None:
        """Return the answer that a piece completes, if it does.

        Raises:
            ApiError: the request is refused; a note says which one of them it is.
            EngineDied: the ring has ended.
        """
        if isinstance(piece, EngineDied):
            raise EngineDied(str(piece))
        partial = self._out[piece.id]
        if piece.head is not None:
            partial.status = piece.head.status
        partial.body += piece.data
        if not piece.last:
            return None
        del self._out[piece.id]
        self._num_sequences -= partial.call.num_sequences
        if partial.status != 200:
            error = error_of(partial.status, bytes(partial.body))
            error.add_note(f"in request {partial.position}, counted from 0")
            raise error
        response = decode(bytes(partial.body), self._kind)
        self._responses[partial.position] = response
        return response

    def responses(self) -> list[A]:
        """Return all answers, in the order of their requests."""
        return [self._responses[position] for position in range(len(self._responses))]

    def close(self) -> None:
        """Drop the open requests."""
        for id in self._out:
            self._ring.close(id)


class OutputStream:
    """One request whose answer is taken as it comes."""

    def __init__(
        self, ring: Ring, put: Put, call: RingRequest, kind: type[ChatChunk] | type[Completion]
    ) -> None:
        self._ring = ring
        self._kind = kind
        self._parser = EventParser()
        self.is_done = False
        self._id = ring.open(call, put)

    def take(self, piece: Piece | EngineDied) -> Iterator[str]:
        """Yield the new text of the first answer.

        Raises:
            ApiError: the request is refused.
            EngineDied: the ring has ended.
        """
        if isinstance(piece, EngineDied):
            raise EngineDied(str(piece))
        self.is_done = piece.last
        if piece.head is not None and piece.head.status != 200:
            raise error_of(piece.head.status, piece.data)
        for event in self._parser.feed(piece.data):
            if text := first_text(event, self._kind):
                yield text
        if piece.last:
            self._parser.check_end()

    def close(self) -> None:
        """Give up, unless all has come."""
        self._ring.close(self._id)
