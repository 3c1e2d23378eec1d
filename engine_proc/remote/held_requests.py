"""Requests for a remote engine that does not serve yet."""

from collections import deque

import msgspec

from headrace.ipc.messages import (
    Abort,
    GeneratedTokens,
    GenerateRequest,
    StopSequence,
    ToEngine,
    request_of,
)
from headrace.ipc.sockets import Frame, Inbox

MAX_GENERATED = 64  # messages of detokenizers, the newest


class HeldRequests:
    """Encoded requests, in the order they came, without those that have ended meanwhile.

    The frontends' admission limits their number: an ended request leaves its place to another. The
    tokens that dead engines have generated for them go first.
    """

    def __init__(self) -> None:
        self._generated: deque[list[Frame]] = deque(maxlen=MAX_GENERATED)
        self._frames: dict[int, list[Frame]] = {}  # by sequence
        self._encoder = msgspec.msgpack.Encoder()

    def __len__(self) -> int:
        return len(self._generated) + len(self._frames)

    def take_all(self, inbox: Inbox[ToEngine]) -> None:
        """Take what has come."""
        while (received := inbox.receive(0)) is not None:
            self.take(*received)

    def take(self, message: ToEngine, frame: Frame) -> None:
        """Keep a request, or drop what a message ends. Other messages say nothing here."""
        match message:
            case GenerateRequest(id):
                self._frames[id] = [self._encoder.encode(message), frame]
            case GeneratedTokens():
                self._generated.append([self._encoder.encode(message), frame])
            case StopSequence(id):
                self._frames.pop(id, None)
            case Abort(request):
                for id in [id for id in self._frames if request_of(id) == request]:
                    del self._frames[id]
            case _:
                pass

    def pop(self) -> list[Frame]:
        """Remove the oldest and return its frames."""
        if self._generated:
            return self._generated.popleft()
        return self._frames.pop(next(iter(self._frames)))
