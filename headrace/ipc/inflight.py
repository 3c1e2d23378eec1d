"""A request on its way around the ring, with everything needed to send it again. Pure.

The sender of a request keeps its body until the response is complete. After a process has died and
been replaced, its requests are sent again: the ring computes the same text, and sends only what the
client does not have.
"""

from dataclasses import dataclass, field

import msgspec

from headrace.board.board import Seat
from headrace.ipc.messages import MORE, HttpRequest, detokenizer_of
from headrace.ipc.sockets import Frame
from headrace.routes import READS

MAX_BLAMED = 2  # deaths of a process while this request was at hand


@dataclass(eq=False, slots=True)
class InflightRequest:
    """A request, and how much of its answer the client has."""

    request: HttpRequest
    body: bytes
    tokenizer: int = -1  # to which it went; -1 is that it waits to be sent
    num_delivered: dict[int, int] = field(default_factory=dict)  # by sequence, as in `HttpRequest`
    is_answered: bool = False  # something has come back since it was sent
    num_blamed: int = 0
    held: list[Frame] = field(default_factory=list)  # of a piece that has not come whole

    def take(self, index: int, data: Frame, last: int, num_delivered: int) -> bool:
        """Take an entry of a sequence's response; return whether it completes a piece.

        The parts of a piece before its last wait in `held`, to be released before the last is used.

        Args:
            last: as in `ResponseFrames`.
            num_delivered: as in `ResponseFrames`.
        """
        self.is_answered = True
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
        """How many bytes of the answer have come and wait for the rest of their piece."""
        return sum(map(len, self.held))

    def is_lost_with(self, seat: Seat, num_detokenizers: int) -> bool:
        """Whether the process in a seat may have taken this request with it."""
        match seat.role:
            case "tokenizer":
                return self.tokenizer == seat.index and self.is_with_tokenizer
            case "engine":
                return not self.is_read
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
        return self.tokenizer >= 0 and (self.is_read or not self.is_answered)

    def blame(self, in_progress: int) -> bool:
        """Take note of what a dead process was at; return whether this is sent once more."""
        self.num_blamed += in_progress == self.request.id
        return self.num_blamed < MAX_BLAMED

    def renew(self, id: int, is_suspect: bool = False, is_reply_suspect: bool = False) -> None:
        """Be sent once more, with a new id. A suspect stays one."""
        before = self.request
        self.request = msgspec.structs.replace(
            before,
            id=id,
            origin=before.first_id,
            resumes=before.id,
            num_delivered=dict(self.num_delivered),
            is_suspect=is_suspect or before.is_suspect,
            is_reply_suspect=is_reply_suspect or before.is_reply_suspect,
        )
        self.tokenizer, self.is_answered = -1, False
        self.held.clear()
