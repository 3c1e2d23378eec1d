"""The connection of an `Engine` to its ring: it sits in the frontend's seat.

One thread owns all sockets, so nothing is locked. Callers hand it requests, and it passes each
answer to its caller's function.
"""

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from headrace.board.board import State
from headrace.board.fields import FrontendField
from headrace.config.config import ServerConfig
from headrace.errors import DeadlyRequest, EngineDied
from headrace.ipc.inflight import InflightRequest
from headrace.ipc.messages import (
    MAX_SEQUENCES,
    Head,
    HttpRequest,
    ResponseFrames,
    ToFrontend,
    request_id,
    request_of,
)
from headrace.ipc.router import Router
from headrace.ipc.sockets import Frame, Inbox, address
from headrace.launch.embedded import EmbeddedServer, RingReady

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


class Ring:
    """Open requests of one process. Any thread may use it, and any event loop."""

    def __init__(self, server: EmbeddedServer) -> None:
        """Take the frontend's seat of a starting ring, and wait until it serves."""
        self._server = server
        # As many sequences wait in the engine as run, so that each that ends is followed at once;
        # the others wait here, so that the engine's queue stays short.
        self.places = 2 * server.config.max_num_seqs
        self._slot = server.board.slot("frontend")
        self._pid = os.getpid()
        self._counter = itertools.count(1)
        self._puts: dict[int, Put] = {}  # by request
        self._failure: EngineDied | None = None
        self._is_shut_down = False
        # From here on all is the thread's.
        self._waiting: deque[tuple[HttpRequest, RingRequest]] = deque()
        self._running: dict[int, int] = {}  # sequences of each request that has been sent
        self._sent: dict[int, InflightRequest] = {}  # the same requests, by the ids they have now
        self._num_running = 0
        num_tokenizers = server.config.tokenizer_procs
        self._links = Router(
            server.run_dir, num_tokenizers, server.board, self._slot, answers_gets=False
        )
        self._inbox: Inbox[ToFrontend] = Inbox(
            address(server.run_dir, "frontend"), ToFrontend, high_water=0
        )
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
        id = request_id(0, next(self._counter))
        self._puts[id] = put  # before the look at `_failure`, after which all puts are told
        request = HttpRequest(id, "POST", call.path, time.time())
        try:
            if self._failure is not None:
                raise self._failure
            self._loop.call_soon_threadsafe(self._accept, request, call)
        except (EngineDied, RuntimeError):  # a closed loop's error
            self._puts.pop(id, None)
            raise EngineDied(str(self._failure)) from None
        return id

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
        self._links.resend(lambda: list(self._sent.values()), self._renumber, self._give_up)
        self._links.renew(self._sent)
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
                self._sent[request.id] = sent
                self._running[request.id] = call.num_sequences
                self._num_running += call.num_sequences
            self._waiting.popleft()
        self._links.flush()

    def _abort(self, id: int) -> None:
        if id in self._running:
            self._num_running -= self._running.pop(id)
            sent = next(sent for sent in self._sent.values() if sent.request.first_id == id)
            del self._sent[sent.request.id]
            self._links.abort(sent)
            self._flush()

    def _renumber(self, sent: InflightRequest) -> int:
        """Give a request that is sent again a new id. Its caller knows it by the first."""
        del self._sent[sent.request.id]
        id = request_id(0, next(self._counter))
        self._sent[id] = sent
        return id

    def _give_up(self, sent: InflightRequest) -> None:
        """Answer a request at which processes die."""
        error = DeadlyRequest()
        body = msgspec.json.encode(error.body())
        self._put(sent.request.id, Head(error.status, JSON), body, True)

    def _deliver(self, frames: ResponseFrames, data: Frame) -> None:
        for id, head, entry, last, num_delivered in frames.split(data):
            sent = self._sent.get(request_of(id))
            if sent is not None:
                head = None if sent.num_delivered else head
                if sent.take(id % MAX_SEQUENCES, entry, last, num_delivered):
                    piece = b"".join((*sent.release(), entry))
                    self._put(request_of(id), head, piece, bool(last))
        self._slot.add(FrontendField.MESSAGES_TAKEN)
        self._flush()

    def _put(self, id: int, head: Head | None, data: bytes, last: bool) -> None:
        """Hand on a piece of the answer to the request that has an id now."""
        first_id = self._sent[id].request.first_id
        put = self._puts.pop(first_id, None) if last else self._puts.get(first_id)
        if last:
            self._num_running -= self._running.pop(first_id, 0)
            del self._sent[id]
        if put is not None:
            put(Piece(first_id, head, data, last))
