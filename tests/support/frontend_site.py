"""A frontend's application as uvicorn has it, with the ring played by the test."""

import asyncio
import os
import time
from typing import Any

from fake_links import FakeLinks

from headrace.board.board import Board, Seat, Slot
from headrace.config.api_keys import digest
from headrace.frontend.admin import Admin
from headrace.frontend.admission.admission import Admission, AdmissionLimits
from headrace.frontend.admission.api_key_auth import ApiKeyAuth
from headrace.frontend.admission.gate import Gate
from headrace.frontend.app import App
from headrace.frontend.forwarder import Forwarder
from headrace.frontend.http.cors import Cors
from headrace.frontend.http.request import Headers, HttpExchange, ignore
from headrace.frontend.http.request_head import RequestHead
from headrace.frontend.open_requests import OpenRequests
from headrace.ipc.messages import Head, HttpRequest
from headrace.ipc.published_page import PublishedPage
from headrace.ipc.sockets import Frame
from headrace.runtime.wake_clock import WakeClock

LIMIT = 100  # bytes of a body
DEADLINE_S = 120
MAX_REQUESTS = 50
Message = dict[str, Any]


class Client(HttpExchange):
    """A request, and what its client sees of the answer."""

    def __init__(
        self,
        *chunks: bytes,
        path: str = "/v1/completions",
        headers: tuple[tuple[bytes, bytes], ...] = (),
        content_type: bytes = b"application/json",
        host: bytes | None = b"x",
        method: str = "POST",
        has_all: bool = True,
    ) -> None:
        """Send a body in pieces, which have come already; or not `has_all` of them."""
        self.method, self.path = method, path
        fields = [(b"content-type", content_type)] if content_type else []
        if any(chunks) and b"content-length" not in dict(headers):
            fields.append((b"transfer-encoding", b"chunked"))
        hosts = [] if host is None else [(b"host", host)]
        self.headers = (*headers, *fields, *hosts)
        self.head = RequestHead.of(self.headers)
        self.received_at = time.monotonic_ns()
        self.common = ()
        self.on_lost = self.on_writable = ignore
        self.status = 0
        self.response_head: dict[bytes, bytes] = {}
        self.length: int | None = None
        self.pieces: list[bytes] = []
        self.is_broken = False
        self.reads = True
        self._end = asyncio.Event()
        self._has_left = False
        self._body = b"".join(chunks) if has_all and len(chunks) == 1 else None
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        for number, chunk in enumerate(chunks, 1):
            more = not has_all or number < len(chunks)
            self._incoming.put_nowait({"type": "http.request", "body": chunk, "more_body": more})

    def leave(self) -> None:
        """Close the connection, and have the server notice."""
        self._has_left = True
        self._incoming.put_nowait({"type": "http.disconnect"})
        self.on_lost()

    def send_rest(self, chunk: bytes) -> None:
        """Send what is left of the body."""
        self._incoming.put_nowait({"type": "http.request", "body": chunk, "more_body": False})

    def read_on(self) -> None:
        """Read again, after not having read."""
        self.reads = True
        self.on_writable()

    @property
    def version(self) -> str:
        return "1.1"

    @property
    def query(self) -> bytes:
        return b""

    @property
    def is_given_up(self) -> bool:
        return self._has_left

    @property
    def is_complete(self) -> bool:
        return self._end.is_set()

    @property
    def is_writable(self) -> bool:
        return self.reads

    @property
    def clear_socket(self) -> int:
        return -1

    def take_body(self) -> bytes | None:
        return self._body

    async def receive(self) -> Message:
        return await self._incoming.get()

    async def all_read(self) -> None:
        """Wait until all that was sent has been read."""
        while self._incoming.qsize():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def answered(self) -> None:
        """Wait for the end of the answer."""
        await asyncio.wait_for(self._end.wait(), DEADLINE_S)

    def begin(self, status: int, headers: Headers, length: int | None = None) -> None:
        assert not self.status
        self.status, self.response_head, self.length = status, dict(headers), length

    def write(self, data: Frame, num_written: int = 0) -> None:
        assert self.status
        assert self.reads
        assert not self.is_complete
        self.pieces.append(bytes(data))

    def end(self, data: Frame = b"") -> None:
        self.write(data)
        self._end.set()

    def break_off(self) -> None:
        self.is_broken = True

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


class Site:
    """An application whose tokenizers and detokenizers are the test."""

    def __init__(
        self, *keys: bytes, cors: Cors | None = None, metrics: PublishedPage | None = None
    ) -> None:
        self.board = Board.create([Seat("frontend", 0), Seat("engine", 0)])
        self.open_requests = OpenRequests(0, self.slot)
        self.links = FakeLinks()
        admission = Admission(AdmissionLimits(1000, 10 * LIMIT))
        key_auth = ApiKeyAuth(map(digest, keys))
        gate = Gate(key_auth, admission, LIMIT, self.board, self.slot, [MAX_REQUESTS])
        forwarder = Forwarder(
            self.open_requests, self.links, self.slot, gate, LIMIT, metrics=metrics
        )
        self.gate = gate
        admin = Admin(ApiKeyAuth([digest(b"admin")]), self.board, self.slot, os.getpid(), False)
        self.app = App(self.board, WakeClock(), forwarder, gate, admin, cors)

    @property
    def slot(self) -> Slot:
        return self.board.slot("frontend")

    def ask(self, client: Client) -> Client:
        self.app(client)
        return client

    async def forwarded(self) -> tuple[HttpRequest, bytes]:
        return await asyncio.wait_for(self.links.forwarded.get(), DEADLINE_S)

    def answer(self, id: int, data: bytes, last: bool, head: Head | None = None) -> None:
        self.open_requests.deliver(id, head, data, last, 0)
