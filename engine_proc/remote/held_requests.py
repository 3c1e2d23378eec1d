"""Requests for a remote engine that does not serve yet."""

import msgspec

from headrace.ipc.messages import Abort, GenerateRequest, StopSequence, ToEngine, request_of
from headrace.ipc.sockets import Frame, Inbox


class HeldRequests:
    """Encoded requests, in the order they came, without those that have ended meanwhile.

    The frontends' admission limits their number: an ended request leaves its place to another.
    """

    def __init__(self) -> None:
        self._frames: dict[int, list[Frame]] = {}  # by sequence
        self._encoder = msgspec.msgpack.Encoder()

    def __len__(self) -> int:
        return len(self._frames)

    def take_all(self, inbox: Inbox[ToEngine]) -> None:
        """Take what has come."""
        while (received := inbox.receive(0)) is not None:
            self.take(*received)

    def take(self, message: ToEngine, frame: Frame) -> None:
        """Keep a request, or drop what a message ends. Other messages say nothing here."""
        match message:
            case GenerateRequest(id):
                self._frames[id] = [self._encoder.encode(message), frame]
            case StopSequence(id):
                self._frames.pop(id, None)
            case Abort(request):
                for id in [id for id in self._frames if request_of(id) == request]:
                    del self._frames[id]
            case _:
                pass

    def pop(self) -> list[Frame]:
        """Remove the oldest and return its frames."""
        return self._frames.pop(next(iter(self._frames)))
