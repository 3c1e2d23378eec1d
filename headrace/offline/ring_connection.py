"""The connection of an `Engine` to its ring: it sits in the frontend's seat.

One thread owns all sockets, so nothing is locked. Callers hand it requests, and it passes each
answer to its caller's function.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from headrace.board.board import State
from headrace.board.fields import FrontendField
from headrace.config.config import ServerConfig
from headrace.errors import ApiError, DeadlyRequest, EngineDied, RequestError
from headrace.ipc.adapter_registry import AdapterRegistry
from headrace.ipc.inflight import InflightRequest, InflightRequests
from headrace.ipc.messages import Head, HttpRequest, ResponseFrames, ToFrontend
from headrace.ipc.router import Router
from headrace.ipc.sockets import Frame, Inbox, address
from headrace.launch.embedded import EmbeddedServer, RingReady
from headrace.offline.lora_request import LoRARequest
from headrace.response_bodies.errors import openai_error

JSON = "application/json"
BEAT_S = 0.1  # between heartbeats and tries to send what a full link has refused
SHUT_DOWN = "the engine has been shut down"


class Piece(NamedTuple):
    """News of one request: its head, the first time, and bytes of its answer."""

    id: int
    head: Head | None
    data: bytes
    last: bool


Put = Callable[[Piece | EngineDied], None]  # must not wait


@dataclass(frozen=True)
class RingRequest:
    """A POST request. It takes `num_sequences` of the places in the engine."""

    path: str
    body: bytes
    num_sequences: int = 1


@dataclass(eq=False)
class RingResponse:
    """The response to a request that has been sent, as pieces.

    Args:
        on_piece: is called with each.
    """

    id: int
    sent: InflightRequest | None
    num_sequences: int
    on_piece: Callable[[Piece], None]
    head: Head | None = None
    has_begun: bool = False
    complete: bool = False
    parts: list[Frame] = field(default_factory=list)

    def hold(self, part: Frame) -> None:
        """Take a part of a piece whose last part follows in `deliver`."""
        self.parts.append(part)

    def deliver(self, data: Frame, last: bool, num_written: int = 0) -> None:
        """Hand on a piece, the first one with the head."""
        assert self.sent is not None
        head, self.head, self.has_begun = self.head, None, True
        self.complete |= last
        piece = b"".join((*self.parts, data))
        self.parts.clear()
        self.on_piece(Piece(self.sent.request.first_id, head, piece, last))


class Ring:
    """Open requests of one process. Any thread may use it, and any event loop."""

    def __init__(self, server: EmbeddedServer) -> None:
        """Take the frontend's seat of a starting ring, and wait until it serves."""
        self._server = server
        # As many sequences wait in the engine as run, so that each that ends is followed at once.
        # The others wait here, so the engine's queue stays short.
        self.places = 2 * server.config.max_num_seqs
        self._slot = server.board.slot("frontend")
        self._pid = os.getpid()
        self._inflight: InflightRequests[RingResponse] = InflightRequests(0)
        self._puts: dict[int, Put] = {}  # by request
        self._failure: EngineDied | None = None
        self._is_shut_down = False
        # From here on all is the thread's.
        self._waiting: deque[tuple[HttpRequest, RingRequest]] = deque()
        self._running: dict[int, RingResponse] = {}  # by the first id, which callers know
        self._num_running = 0  # sequences
        num_tokenizers = server.config.tokenizer_procs
        self._links = Router(
            server.run_dir, num_tokenizers, server.board, self._slot, handles_gets=False
        )
        self._inbox: Inbox[ToFrontend] = Inbox(
            address(server.run_dir, "frontend"), ToFrontend, high_water=0
        )
        self._adapters = AdapterRegistry(server.run_dir, server.config.lora_dir)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="headrace ring", daemon=True)
        try:
            self._slot.enter(State.READY)
            report = server.receive()
            assert isinstance(report, RingReady)
            self._thread.start()
        except BaseException:
            self._end(EngineDied(SHUT_DOWN))
            self._close()
            raise

    @classmethod
    def start(cls, config: ServerConfig) -> "Ring":
        """Start the processes and wait until they serve.

        Raises:
            ConfigError, ModelError: there is no such model, or it cannot be used.
            EngineDied: a process could not start; the text says which and why.
        """
        server = EmbeddedServer(config)
        try:
            return cls(server)
        except BaseException:
            server.stop()
            raise

    # For callers

    def open(self, call: RingRequest, put: Put) -> int:
        """Send a request; its answer goes to `put`, piece by piece. Return its id.

        Raises:
            EngineDied: the ring has ended. Where it ends later, `put` gets the error.
        """
        if os.getpid() != self._pid:
            raise EngineDied(f"the engine belongs to process {self._pid}, this is a fork of it")
        id = self._inflight.next_id()
        self._puts[id] = put  # before the look at `_failure`, after which all puts fail
        request = HttpRequest(id, "POST", call.path, time.time())
        try:
            if self._failure is not None:
                raise self._failure
            self._loop.call_soon_threadsafe(self._accept, request, call)
        except (EngineDied, RuntimeError):  # a closed loop's error
            self._puts.pop(id, None)
            raise EngineDied(str(self._failure)) from None
        return id

    def adapter_fields(self, lora_request: LoRARequest | None) -> dict[str, Any]:
        """Add an adapter; return the fields of a body that name it.

        Raises:
            ApiError: it cannot be added.
        """
        if lora_request is None:
            return {}
        name, path = lora_request.lora_name, os.fspath(lora_request.lora_path)
        try:
            self._adapters.add(name, path)
        except RequestError as error:
            raise ApiError(error.status, str(error), error.code, error.param) from None
        return {"model": name}

    def close(self, id: int) -> None:
        """Stop waiting for a request; it is aborted unless its answer has been complete."""
        if self._puts.pop(id, None) is not None and self._failure is None:
            self._call(self._abort, id)

    def shutdown(self) -> None:
        """End the ring and every process of it; open requests get an error."""
        if os.getpid() != self._pid or self._is_shut_down:
            return
        self._is_shut_down = True
        self._call(self._end, EngineDied(SHUT_DOWN))
        if threading.current_thread() is not self._thread:  # which may collect an engine
            self._thread.join()
        self._server.stop()

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """Run `function` in the thread, unless that has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    # In the thread

    def _serve(self) -> None:
        self._inbox.attach(self._loop, self._deliver)
        self._loop.add_reader(self._server.control.fileno(), self._hear)
        self._loop.call_soon(self._beat)
        self._loop.run_forever()
        self._close()

    def _end(self, error: EngineDied) -> None:
        self._failure = self._failure or error
        self._loop.stop()

    def _close(self) -> None:
        """Drop all links, then fail all waiting callers; no new one can come."""
        self._inbox.close()
        self._links.close()
        self._loop.close()
        assert self._failure is not None
        for put in list(self._puts.values()):
            put(self._failure)

    def _hear(self) -> None:
        """Handle the supervisor's report that the ring has ended."""
        try:
            self._server.receive()
        except EngineDied as error:
            self._end(error)

    def _beat(self) -> None:
        self._slot.beat()
        self._flush()
        self._links.resend(self._inflight, self._fail)
        self._links.renew(self._inflight.ids)
        self._loop.call_later(BEAT_S, self._beat)

    def _accept(self, request: HttpRequest, call: RingRequest) -> None:
        self._waiting.append((request, call))
        self._flush()

    def _flush(self) -> None:
        """Send the requests that have a place, in order."""
        while self._waiting:
            request, call = self._waiting[0]
            if request.id in self._puts:
                is_full = self._num_running + call.num_sequences > self.places
                sent = InflightRequest(request, call.body)
                if (self._running and is_full) or not self._links.forward(sent):
                    break
                response = RingResponse(request.id, sent, call.num_sequences, self._put)
                self._inflight.add(response)
                self._running[request.id] = response
                self._num_running += call.num_sequences
            self._waiting.popleft()
        self._links.flush()

    def _abort(self, id: int) -> None:
        sent = self._forget(id)
        if sent is not None:
            self._links.abort(sent)
            self._flush()

    def _forget(self, id: int) -> InflightRequest | None:
        """Return a request that has been sent, by its first id, and its places."""
        response = self._running.pop(id, None)
        if response is None:
            return None
        self._num_running -= response.num_sequences
        self._inflight.remove(response)
        return response.sent

    def _fail(self, sent: InflightRequest) -> None:
        """Fail a request at which processes die."""
        error = DeadlyRequest()
        body = msgspec.json.encode(openai_error(error))
        self._put(Piece(sent.request.first_id, Head(error.status, JSON), body, True))

    def _deliver(self, frames: ResponseFrames, data: Frame) -> None:
        for entry in frames.split(data):
            self._inflight.deliver(*entry, engine=frames.engine)
        self._slot.add(FrontendField.MESSAGES_TAKEN)
        self._flush()

    def _put(self, piece: Piece) -> None:
        """Hand on a piece of a response to the caller that waits for it."""
        put = self._puts.pop(piece.id, None) if piece.last else self._puts.get(piece.id)
        if piece.last:
            self._forget(piece.id)
        if put is not None:
            put(piece)
