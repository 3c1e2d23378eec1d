"""The load generator's connection, against a server that says what it is told to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from headrace.bench.connection import Record, parse_timing
from headrace.bench.load import LoadRequest, LoadSender, Target, shares

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Server-Timing: tokenize;dur=1.25, queue;desc=x;dur=0.5, cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
Writer = asyncio.StreamWriter


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def serving(answer: Callable[[Writer], Awaitable[None]]) -> AsyncIterator[str]:
    """Answer every request by `answer`, and yield the URL."""

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                await answer(writer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}/v1/chat/completions"


async def asked(answer: Callable[[Writer], Awaitable[None]], times: int = 1) -> list[Record]:
    """Send requests, one after the other; return what is recorded."""
    async with serving(answer) as url:
        sender = LoadSender(Target(url), max_concurrency=1)
        await asyncio.gather(*(sender.send(LoadRequest(i, 0.0, b"{}"), 0.0) for i in range(times)))
        sender.close()
        return sender.records


async def stream(writer: Writer) -> None:
    """Say three pieces, cut where they may be cut."""
    whole = ROLE + EVENT % b"a" + EVENT % b"b" + EVENT % b"c" + USAGE + DONE
    writer.write(HEAD)
    for cut in (whole[:30], whole[30:100], whole[100:]):
        writer.write(chunk(cut))
        await writer.drain()
    writer.write(chunk(b""))


async def test_pieces_with_text_are_timed_and_usage_counts() -> None:
    first, second = await asked(stream, times=2)
    for record in (first, second):
        assert record.error == ""
        assert 0 < record.sent < record.first <= record.last
        assert len(record.gaps) == 4 * 2  # three pieces; a role or usage alone is none
        assert (record.prompt_tokens, record.output_tokens) == (7, 5)
        assert record.timing == {"tokenize": 1.25, "queue": 0.5}
    assert first.last < second.sent


async def test_crlf_is_a_line_s_end_too() -> None:
    async def answer(writer: Writer) -> None:
        data = (EVENT % b"a" + EVENT % b"b" + DONE).replace(b"\n", b"\r\n")
        writer.write(HEAD + chunk(data) + chunk(b""))

    (record,) = await asked(answer)
    assert (record.error, record.output_tokens) == ("", 2)  # without usage, pieces are counted


async def test_other_servers_write_events_in_other_ways() -> None:
    async def answer(writer: Writer) -> None:
        named = b"event: message\nid: 1\n" + EVENT % b"a"
        bare = (EVENT % b"b").replace(b"data: ", b"data:")
        writer.write(HEAD + chunk(b": a comment\n\n" + named + bare + DONE) + chunk(b""))

    (record,) = await asked(answer)
    assert (record.error, record.output_tokens) == ("", 2)


async def test_an_answer_that_does_not_stream_ends_at_once() -> None:
    async def answer(writer: Writer) -> None:
        body = b'{"data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3}}'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)

    (record,) = await asked(answer)
    assert (record.error, record.prompt_tokens, record.first) == ("", 3, record.last)


async def test_tokens_without_text_count_from_the_stream_s_end() -> None:
    async def answer(writer: Writer) -> None:
        writer.write(HEAD + chunk(ROLE + USAGE + DONE) + chunk(b""))

    (record,) = await asked(answer)
    assert (record.error, record.output_tokens, record.first) == ("", 5, record.last)
    assert record.sent < record.first


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 5\r\n\r\nlater", "status 429: later"),
        (HEAD + chunk(EVENT % b"a"), "the connection was closed"),
        (HEAD + chunk(b'data: {"error": {"message": "died"}}\n\n') + chunk(b""), "died"),
        (HEAD + chunk(b"data: {]}\n\n"), "not an answer"),
        (HEAD + chunk(DONE) + chunk(b""), "the stream has no text"),
        (b"SSH-2.0-OpenSSH\r\n", "not an answer"),
    ],
)
async def test_what_is_no_answer_is_an_error_of_its_request(data: bytes, error: str) -> None:
    async def answer(writer: Writer) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    (record,) = await asked(answer)
    assert error in record.error


async def test_refused_connection_is_an_error_too() -> None:
    async with serving(stream) as url:
        pass
    sender = LoadSender(Target(url))
    await sender.send(LoadRequest(0, 0.0, b"{}"), 0.0)
    assert sender.records[0].error.startswith("cannot connect")


def test_timing_headers() -> None:
    assert parse_timing("a;dur=1, b;desc=x;dur=2.5,c") == {"a": 1.0, "b": 2.5}


def test_processes_share_requests_and_places() -> None:
    requests = [LoadRequest(i, 0.0, b"") for i in range(7)]
    dealt = shares(Target(""), requests, max_concurrency=5, num_procs=2)
    assert [[r.index for r in share.requests] for share in dealt] == [[0, 2, 4, 6], [1, 3, 5]]
    assert [share.max_concurrency for share in dealt] == [3, 2]
    assert len(shares(Target(""), requests, max_concurrency=1, num_procs=4)) == 1
