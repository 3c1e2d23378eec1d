"""Playing the processes around an `EngineCore`, over real links and without a model."""

import socket
import threading
from pathlib import Path
from typing import Any

import msgspec

from headrace.board.board import Board, State
from headrace.config.config import ServerConfig
from headrace.ipc.messages import (
    Abort,
    Head,
    HttpRequest,
    RenewLeases,
    ResponseFrames,
    ToEngine,
    ToTokenizer,
)
from headrace.ipc.sockets import Inbox, Outbox, address
from headrace.launch.embedded import EmbeddedServer, RingFailed, RingReady
from headrace.supervision.seats import seats_of

DEADLINE_MS = 120_000
JSON = Head(200, "application/json")
EVENTS = Head(200, "text/event-stream; charset=utf-8")
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}

Object = dict[str, Any]


def event(choice: Object) -> bytes:
    """One chunk of a stream."""
    chunk = {"id": "x", "created": 5, "model": "tiny", "choices": [{"index": 0, **choice}]}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


class Exited:
    """A process that has ended."""

    def wait(self) -> int:
        """Return its exit status."""
        return 7


class PlayedRing(EmbeddedServer):
    """A scripted supervisor, tokenizer, engine and detokenizer."""

    def __init__(self, config: ServerConfig, run_dir: Path) -> None:
        self.config = config
        self.run_dir = str(run_dir)
        self.board = Board.create(seats_of(config, handles_gets=False))
        self.control, self.supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.tokenizer: Inbox[ToTokenizer] = Inbox(address(self.run_dir, "tokenizer"), ToTokenizer)
        self.engine: Inbox[ToEngine] = Inbox(address(self.run_dir, "engine"), ToEngine)
        self.detokenizer = Outbox(address(self.run_dir, "frontend"))
        self.is_stopped = threading.Event()
        self.process = Exited()  # type: ignore[assignment]
        self.report(RingReady())

    def report(self, report: RingReady | RingFailed) -> None:
        """Send a report of the supervisor."""
        self.supervisor.send(msgspec.msgpack.encode(report))

    def next_request(self, timeout_ms: int = DEADLINE_MS) -> tuple[HttpRequest, Object] | None:
        """Receive as the tokenizer."""
        received = self.tokenizer.receive(timeout_ms)
        if received is None:
            return None
        return received[0], msgspec.json.decode(received[1])

    def request(self) -> tuple[HttpRequest, Object]:
        """Receive what must come."""
        received = self.next_request()
        assert received is not None, "no request came"
        return received

    def aborted(self) -> int:
        """Receive an abort as the engine."""
        while (received := self.engine.receive(DEADLINE_MS)) is not None:
            if isinstance(received[0], Abort):
                return received[0].request
            assert isinstance(received[0], RenewLeases)
        raise AssertionError("no abort came")

    def send(self, request: HttpRequest, head: Head | None, data: bytes, last: bool) -> None:
        """Answer as the detokenizer."""
        heads = {} if head is None else {request.id: head}
        self.detokenizer.send(ResponseFrames.of(heads, [request.id], [len(data)], [last]), data)

    def answer(self, request: HttpRequest, body: Object, status: int = 200) -> None:
        """Answer whole."""
        self.send(request, Head(status, JSON.content_type), msgspec.json.encode(body), True)

    def complete(self, request: HttpRequest, *texts: str) -> None:
        """Answer a completion, with a choice per text."""
        choices = [
            {"index": i, "text": text, "finish_reason": "length"} for i, text in enumerate(texts)
        ]
        identity = {"id": f"cmpl-{request.id}", "created": 5, "model": "tiny"}
        self.answer(request, identity | {"choices": choices, "usage": USAGE})

    def refuse(self, request: HttpRequest, message: str) -> None:
        """Answer with an error."""
        fields = {"message": message, "code": "invalid_value", "param": "prompt"}
        self.answer(request, {"error": fields}, 400)

    def stop(self) -> None:
        """End as a ring does."""
        self.board.slot("frontend").enter(State.DEAD)
        self.tokenizer.close()
        self.engine.close()
        self.detokenizer.close()
        self.supervisor.close()
        self.control.close()
        self.is_stopped.set()
