"""One HTTP/1.1 connection of the load generator: a request written, its answer timed as it comes.

A client that costs much measures itself. There is one callback per read and one typed decode per
event; nothing else of an answer is kept but numbers.
"""

import asyncio
import time
from array import array
from typing import Any, cast

import httptools
import msgspec


class ReceivedDelta(msgspec.Struct):
    """A piece of a chat message."""

    content: str | None = None
    reasoning_content: str | None = None


class ReceivedChoice(msgspec.Struct):
    """A piece of a text."""

    delta: ReceivedDelta | None = None
    text: str | None = None


class ReceivedUsage(msgspec.Struct):
    """Token counts from `usage`."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None


class ReceivedEvent(msgspec.Struct):
    """The parsed fields of a stream event, and of an answer that does not stream."""

    choices: list[ReceivedChoice] = []
    usage: ReceivedUsage | None = None
    error: Any = None


class Record(msgspec.Struct, array_like=True):
    """One request and its answer. Times are of CLOCK_MONOTONIC, in seconds; 0.0 is never."""

    index: int
    due: float  # when it was to be sent
    sent: float = 0.0
    first: float = 0.0  # its first piece of text came
    last: float = 0.0  # and its last; of an answer that does not stream, or fails, the end
    gaps: bytes = b""  # f32, seconds between each piece of text and the one before
    prompt_tokens: int = 0
    output_tokens: int = 0  # what the server says, else how many pieces came
    error: str = ""  # "" is success
    timing: dict[str, float] = {}  # `Server-Timing`, milliseconds


EVENTS: msgspec.json.Decoder[ReceivedEvent] = msgspec.json.Decoder(ReceivedEvent)
MAX_ERROR = 300  # characters kept of an error


def has_text(event: ReceivedEvent) -> bool:
    """Whether an event brings text."""
    for choice in event.choices:
        delta = choice.delta
        if choice.text or (delta is not None and (delta.content or delta.reasoning_content)):
            return True
    return False


def data_of(event: bytes) -> bytes:
    """Return the data of an event that has other lines, too, or no space after the colon."""
    lines = [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).strip()


def parse_timing(value: str) -> dict[str, float]:
    """Read a `Server-Timing` header: `name;dur=1.5, …`; entries without a duration are left out."""
    timing = {}
    for entry in value.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, number = parameter.partition("=")
            if key == "dur":
                timing[name] = float(number)
    return timing


class BenchConnection(asyncio.Protocol):
    """One connection. It takes one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._record: Record | None = None
        self._done: asyncio.Future[None] | None = None
        self.is_open = False

    async def open_request(self, request: bytes, record: Record) -> None:
        """Send a request and fill its record; an error is an entry of the record too."""
        assert self._transport is not None
        self._record = record
        self._done = asyncio.get_running_loop().create_future()
        self._status = 0
        self._streams = False
        self._rest = b""
        self._gaps = array("f")
        record.sent = time.monotonic()
        self._transport.write(request)
        await self._done
        record.gaps = self._gaps.tobytes()
        record.output_tokens = record.output_tokens or (len(self._gaps) + bool(record.first))
        if self._streams and not record.error and not record.first:
            record.error = "the stream has no text"

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's derives from neither
        self.is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._finish(f"the connection was closed: {error or 'before the end of the answer'}")

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._finish(f"not an answer: {error}")
            self.close()

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._streams = value.startswith(b"text/event-stream")
        elif name == b"server-timing" and self._record is not None:
            self._record.timing = parse_timing(value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if not self._streams or self._record is None:
            self._rest += data
            return
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            data = event[6:] if event.startswith(b"data: {") else data_of(event)
            if data.startswith(b"{"):
                self._take(EVENTS.decode(data), self._record)

    def _take(self, event: ReceivedEvent, record: Record) -> None:
        if event.usage is not None:
            record.prompt_tokens = event.usage.prompt_tokens
            record.output_tokens = event.usage.completion_tokens or 0
        if event.error is not None:
            record.error = str(event.error)[:MAX_ERROR]
        if not has_text(event):
            return
        if record.first:
            self._gaps.append(self._now - record.last)
        else:
            record.first = self._now
        record.last = self._now

    def on_message_complete(self) -> None:
        if self._record is None:
            return
        if self._status != 200:
            text = self._rest.decode(errors="replace")
            self._record.last = time.monotonic()
            self._finish(f"status {self._status}: {text}"[:MAX_ERROR])
        elif not self._streams:
            self._take(EVENTS.decode(self._rest), self._record)
            self._record.first = self._record.last = self._now
            self._finish()
        else:
            if not self._record.first and self._record.output_tokens:  # tokens that make no text
                self._record.first = self._record.last = self._now
            self._finish()
        if not self._parser.should_keep_alive():
            self.is_open = False
            self.close()

    def _finish(self, error: str = "") -> None:
        if self._record is None or self._done is None:
            return
        self._record.error = self._record.error or error
        self._record = None
        self._done.set_result(None)
