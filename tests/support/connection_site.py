"""A server of connections over real sockets, served by uvicorn, and its clients."""

import asyncio
import json
import math
import socket
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn

from headrace.frontend.http.connection import Connection
from headrace.frontend.http.deadlines import Deadlines
from headrace.frontend.http.request import HttpExchange
from headrace.frontend.http.start_queue import StartQueue
from headrace.frontend.main import KEEP_ALIVE_S

DEADLINE_S = 120
PATIENCE_S = 20.0
READER_PATIENCE_S = 0.05
LEAVING_S = 0.1  # for connections to end with their server, as uvicorn has it
LARGE = 1 << 20  # bytes of an answer; some fit into the buffers of sockets


async def read(request: HttpExchange) -> bytes:
    body = request.take_body()
    if body is not None:
        return body
    pieces = []
    while True:
        message = await request.receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def pour(request: HttpExchange) -> None:
    """Write as long as the client reads."""
    while request.is_writable:
        request.write(bytes(1 << 16))


class PromptServer(uvicorn.Server):
    """uvicorn's server, but that it ends when told, not at a tick and 0.1 s later."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._end = asyncio.Event()

    def end(self) -> None:
        """Accept no more clients, and leave those there are."""
        self.should_exit = self.force_exit = True
        self._end.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._end.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_S):
                while self.server_state.connections:
                    await asyncio.sleep(LEAVING_S / 20)


class Site:
    """A server with one application, whose clients have time until `be_impatient`."""

    def __init__(
        self,
        max_connections: int = 100,
        reader_patience_s: float = DEADLINE_S,
        keep_alive_s: int = KEEP_ALIVE_S,
    ) -> None:
        self.deadlines: Deadlines[Connection] = Deadlines(PATIENCE_S)
        self.readers: Deadlines[Connection] = Deadlines(reader_patience_s)
        self.num_large = 0
        self._clients: list[Client] = []
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.go = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.is_leaving = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_heard = 0
        site = self

        class Counted(Connection):
            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                site.num_heard += len(data)

        http: Any = partial(
            Counted,
            self.deadlines,
            self.readers,
            StartQueue(),
            max_connections,
            is_leaving=lambda: self.is_leaving,
        )
        self._server = PromptServer(
            uvicorn.Config(
                self.app,  # type: ignore[arg-type]  # called by `Connection` alone
                http=http,
                ws="none",
                interface="asgi3",
                lifespan="off",
                log_config=None,
                timeout_keep_alive=keep_alive_s,
                proxy_headers=False,
            )
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def app(self, request: HttpExchange) -> None:
        self.has_begun.set()
        if request.path in ("/pour", "/large", "/brim"):
            self._answer_much(request)
            return
        if request.path == "/fail":
            raise ValueError("unexpected")
        answer = self._tell if request.path in ("/told", "/steps") else self._answer
        task = asyncio.create_task(answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answer_much(self, request: HttpExchange) -> None:
        match request.path:
            case "/pour":
                request.on_lost = partial(self.lost.put_nowait, "cut off")
                request.on_writable = partial(pour, request)
                request.begin(200, [])
                pour(request)
            case "/large":
                self.num_large += 1
                request.respond(200, [], bytes(LARGE))
            case "/brim":
                request.begin(200, [])
                while not request._cycle.transport.get_write_buffer_size():
                    request.write(bytes(1 << 12))  # until the kernel takes no more
                request.end()
                self.lost.put_nowait("answered")

    async def _tell(self, request: HttpExchange) -> None:
        if request.path == "/told":
            told = f"{request.method} {request.path} ".encode() + await read(request)
            request.respond(200, [], told)
            return
        request.begin(200, [])
        request.write(b"a")
        await self.go.wait()
        request.write(b"b")
        request.end()

    async def _answer(self, request: HttpExchange) -> None:
        match request.path:
            case "/echo":
                request.respond(200, [], await read(request))
            case "/refuse":
                request.respond(429, [], b"no")
            case "/stream":
                body = await read(request)
                request.begin(200, [])
                for piece in (b"a", b"", memoryview(body)):
                    request.write(piece)
                request.end(b"c")
            case "/wait":
                request.on_lost = partial(self.lost.put_nowait, "left")
                request.begin(200, [])
                request.write(b"a")
            case "/late":
                await read(request)
                await self.go.wait()
                request.respond(200, [], b"late")
                self.lost.put_nowait("not sent")
            case "/flood":
                request.begin(200, [])
                pour(request)
                request.on_writable = request.end
            case "/part":
                request.on_lost = partial(self.lost.put_nowait, "parted")
                request.begin(200, [])
                request.write(b"not all")
                request.break_off()

    async def run(self) -> None:
        serving = asyncio.create_task(self._server._serve([self._listener]))
        loop = asyncio.get_running_loop()
        while not serving.done():
            for connection in self.readers.passed(loop.time()):
                connection.on_reader_deadline()
            await asyncio.sleep(READER_PATIENCE_S / 10)
        await serving

    async def be_impatient(self) -> None:
        """Let all client deadlines pass, after sent data has arrived."""
        await self.hear()
        for connection in list(self.deadlines.passed(math.inf)):
            connection.on_deadline()

    async def hear(self) -> None:
        """Wait until clients are connected, and their data has arrived."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.deadlines or self.num_heard < sum(c.num_said for c in self._clients):
                await asyncio.sleep(0)

    async def read_all(self) -> None:
        """Wait until the clients' data has arrived."""
        async with asyncio.timeout(DEADLINE_S):
            while self.num_heard < sum(client.num_said for client in self._clients):
                await asyncio.sleep(0)

    async def stop(self, running: "asyncio.Task[None]") -> None:
        for client in self._clients:
            client.writer.close()
        self._server.end()
        await asyncio.wait_for(running, DEADLINE_S)

    async def is_left(self) -> None:
        """Wait until no client is connected."""
        async with asyncio.timeout(DEADLINE_S):
            while self._server.server_state.connections:
                await asyncio.sleep(0)

    async def connection(self) -> Connection:
        """Wait for the first client; return the server's side of its connection."""
        connections: set[Any] = self._server.server_state.connections
        async with asyncio.timeout(DEADLINE_S):
            while not connections:
                await asyncio.sleep(0)
        first: Connection = next(iter(connections))
        return first

    async def connect(self) -> "Client":
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(client)
        return client


class Client:
    """The other end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.num_said = 0

    def say(self, data: bytes) -> None:
        self.writer.write(data)
        self.num_said += len(data)

    async def response(self) -> tuple[int, bytes]:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
        lines = head.decode().lower().split("\r\n")
        length = next(int(x.split(":")[1]) for x in lines if x.startswith("content-length"))
        body = await asyncio.wait_for(self.reader.readexactly(length), DEADLINE_S)
        return int(lines[0].split()[1]), body

    async def end(self) -> bytes:
        """Wait until the server closes; return the data it sent before."""
        with suppress(ConnectionResetError):
            return await asyncio.wait_for(self.reader.read(), DEADLINE_S)
        return b""


def code(body: bytes) -> str:
    found: str = json.loads(body)["error"]["code"]
    return found
