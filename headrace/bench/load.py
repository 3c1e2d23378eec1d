"""The load: requests sent when they are due, from several processes, so that none is too busy.

A load process is this module, run by a fresh interpreter. It reads its `Share` from standard input
and sends `LoadReady`. Once it gets the time of the start, it sends `LoadProgress` and `LoadDone`.
Each message is a length, four bytes, and msgpack.
"""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop

from headrace.bench.connection import BenchConnection, Record
from headrace.errors import HeadraceError
from headrace.runtime.process import die_with_parent

PROGRESS_S = 0.2
START_S = 0.05  # from all being ready to the first request
BUSY = 0.9  # the share of a core from which on a load process measures itself


class LoadRequest(msgspec.Struct, array_like=True):
    """One request, to be sent `due` seconds after the start."""

    index: int
    due: float
    body: bytes


class Target(msgspec.Struct, array_like=True):
    """The destination of requests."""

    url: str  # with the path
    headers: dict[str, str] = {}


class Share(msgspec.Struct, array_like=True):
    """The requests of one load process."""

    target: Target
    requests: list[LoadRequest]
    max_concurrency: int | None  # of this process


class LoadReady(msgspec.Struct, array_like=True, tag="ready"):
    """The share has been read."""


class LoadProgress(msgspec.Struct, array_like=True, tag="progress"):
    """Progress of a process: sums since the start."""

    num_open: int
    num_done: int
    num_failed: int
    num_tokens: int


class LoadDone(msgspec.Struct, array_like=True, tag="done"):
    """All answers are here."""

    records: list[Record]
    busy: float  # the share of a core that the process used, 0 to 1


LoadReport = LoadReady | LoadProgress | LoadDone
ENCODER = msgspec.msgpack.Encoder()


class LoadSender:
    """Sends requests of one process, over as many connections as it needs."""

    def __init__(self, target: Target, max_concurrency: int | None = None) -> None:
        where = urlsplit(target.url)
        self._host = where.hostname or ""
        self._tls = ssl.create_default_context() if where.scheme == "https" else None
        self._port = where.port or (443 if self._tls else 80)
        path = (where.path or "/") + (f"?{where.query}" if where.query else "")
        lines = {"Host": where.netloc, "Content-Type": "application/json", **target.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._head = f"POST {path} HTTP/1.1\r\n{head}Content-Length: ".encode()
        self._idle: list[BenchConnection] = []
        self._limit = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self.records: list[Record] = []
        self.num_open = 0

    async def send(self, request: LoadRequest, due: float) -> Record:
        """Send a request, as soon as there is a place for it; return what came of it."""
        record = Record(request.index, due)
        async with self._limit or contextlib.nullcontext():
            self.num_open += 1
            try:
                connection = await self._connect()
                data = b"%s%d\r\n\r\n%s" % (self._head, len(request.body), request.body)
                await connection.open_request(data, record)
                if connection.is_open:
                    self._idle.append(connection)
            except OSError as error:
                record.error = f"cannot connect: {error}"
            self.num_open -= 1
        self.records.append(record)
        return record

    async def _connect(self) -> BenchConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            BenchConnection, self._host, self._port, ssl=self._tls
        )
        return connection

    def close(self) -> None:
        """Close all connections."""
        for connection in self._idle:
            connection.close()


def progress_of(records: list[Record], num_open: int = 0) -> LoadProgress:
    """Return how far a load is."""
    failed = sum(bool(record.error) for record in records)
    return LoadProgress(num_open, len(records), failed, sum(r.output_tokens for r in records))


async def send_all(
    share: Share, start: float, report: Callable[[LoadProgress], None]
) -> tuple[list[Record], float]:
    """Send all requests of a share; return the records and the share of a core that this took."""
    sender = LoadSender(share.target, share.max_concurrency)
    await asyncio.sleep(start - time.monotonic())
    used_before = cpu_s()

    async def keep_reporting() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            report(progress_of(sender.records, sender.num_open))

    reporting = asyncio.create_task(keep_reporting())
    sending = []
    for request in share.requests:
        due = start + request.due
        if due > time.monotonic():
            await asyncio.sleep(due - time.monotonic())
        sending.append(asyncio.create_task(sender.send(request, due)))
    await asyncio.gather(*sending)
    reporting.cancel()
    sender.close()
    return sender.records, (cpu_s() - used_before) / max(time.monotonic() - start, 1e-9)


def cpu_s() -> float:
    """Return the processor time this process has used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class LoadResult:
    """The outcome of a load."""

    start: float  # CLOCK_MONOTONIC, s
    records: list[Record]
    busy: list[float]  # the share of a core that each process used

    @property
    def is_client_bound(self) -> bool:
        """Whether a load process was too busy to be believed."""
        return max(self.busy) > BUSY


def shares(
    target: Target, requests: list[LoadRequest], max_concurrency: int | None, num_procs: int
) -> list[Share]:
    """Deal requests out to processes in turn, and with them the places for concurrent ones."""
    num_procs = max(1, min(num_procs, len(requests), max_concurrency or len(requests)))
    result = []
    for i in range(num_procs):
        places = None
        if max_concurrency is not None:
            places = max_concurrency // num_procs + (i < max_concurrency % num_procs)
        result.append(Share(target, requests[i::num_procs], places))
    return result


class LoadProcess:
    """The parent's end of a load process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._input, self._output = process, process.stdin, process.stdout
        self._decoder: msgspec.msgpack.Decoder[LoadReport] = msgspec.msgpack.Decoder(LoadReport)
        self.progress = LoadProgress(0, 0, 0, 0)

    @classmethod
    async def start(cls, share: Share) -> "LoadProcess":
        """Start one and wait until it is ready."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "headrace.bench.load",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        made = cls(process)
        await made._send(share)
        assert isinstance(await made._hear(), LoadReady)
        return made

    async def run(self, start: float) -> LoadDone:
        """Start the load process at `start`; return its results."""
        await self._send(start)
        while isinstance(report := await self._hear(), LoadProgress):
            self.progress = report
        assert isinstance(report, LoadDone)
        self.progress = progress_of(report.records)
        await self._process.wait()
        return report

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self._process.returncode is None:
            self._process.kill()

    async def _send(self, message: Any) -> None:
        self._input.write(framed(message))
        await self._input.drain()

    async def _hear(self) -> LoadReport:
        try:
            length = int.from_bytes(await self._output.readexactly(4), "little")
            return self._decoder.decode(await self._output.readexactly(length))
        except asyncio.IncompleteReadError:
            code = await self._process.wait()
            raise HeadraceError(f"a load process ended, exit code {code}") from None


async def run_load(
    target: Target,
    requests: list[LoadRequest],
    max_concurrency: int | None = None,
    num_procs: int = 1,
    show: Callable[[list[LoadProgress]], None] = lambda _: None,
) -> LoadResult:
    """Send all requests when they are due; `show` is called now and then."""
    dealt = shares(target, requests, max_concurrency, num_procs)
    processes: list[LoadProcess] = []
    try:
        processes += await asyncio.gather(*map(LoadProcess.start, dealt))
        start = time.monotonic() + START_S
        running = [asyncio.create_task(process.run(start)) for process in processes]
        pending = set(running)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=PROGRESS_S)
            show([process.progress for process in processes])
        done = [task.result() for task in running]
    finally:
        for process in processes:
            process.kill()
    records = sorted((r for d in done for r in d.records), key=lambda record: record.index)
    return LoadResult(start, records, [d.busy for d in done])


def framed(message: Any) -> bytes:
    """Return a message as it goes through a pipe."""
    data = ENCODER.encode(message)
    return len(data).to_bytes(4, "little") + data


def main() -> None:
    """Run a load process."""
    die_with_parent(os.getppid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us

    def hear(kind: Any) -> Any:
        length = int.from_bytes(sys.stdin.buffer.read(4), "little")
        return msgspec.msgpack.decode(sys.stdin.buffer.read(length), type=kind)

    # With PYTHONUNBUFFERED, sys.stdout.buffer may write a part and leave the rest to its caller.
    output = open(sys.stdout.fileno(), "wb", closefd=False)  # noqa: SIM115

    def report(message: LoadReport) -> None:
        output.write(framed(message))
        output.flush()

    share = hear(Share)
    gc.disable()  # to look through the records of many requests takes 50 ms, in which none is sent
    report(LoadReady())
    start = hear(float)
    report(LoadDone(*uvloop.run(send_all(share, start, report))))


if __name__ == "__main__":
    main()
