"""Where a request ends, and what its answer is called, whatever comes."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from connection_site import DEADLINE_S, Site, code


@pytest_asyncio.fixture
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    made = Site(**getattr(request, "param", {}))
    running = asyncio.create_task(made.run())
    yield made
    await made.stop(running)


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP\r\n"
INNER = b"GET /told?smuggled HTTP/1.1\r\nhost: x\r\n\r\n"  # a body that looks like a request
SIZED = b"content-length: %d\r\n\r\n%b" % (len(INNER), INNER)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nupgrade: h2c\r\n\r\n" % (
    len(INNER),
    INNER,
)
TOLD = b"POST /told " + INNER
UPGRADES = b"".join(
    [
        b"POST /told HTTP/1.1\r\n" + H2C + SIZED,
        b"GET /told HTTP/1.1\r\n" + H2C + b"\r\n",
        b"POST /told HTTP/1.1\r\n" + H2C + CHUNKED,
        b"GET /told HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"POST /told HTTP/1.1\r\n" + SIZED,
    ]
)


async def test_upgrade_is_ignored_split_at_every_byte(site: Site) -> None:
    client = await site.connect()
    for split in range(1, len(UPGRADES)):
        client.say(UPGRADES[:split])
        await site.read_all()
        client.say(UPGRADES[split:])
        for told in (TOLD, b"GET /told ", TOLD, b"GET /told ", TOLD):
            assert await client.response() == (200, told), split


async def test_upgrade_is_ignored_byte_by_byte(site: Site) -> None:
    client = await site.connect()
    for byte in UPGRADES:
        client.say(bytes([byte]))
        await site.read_all()
    for told in (TOLD, b"GET /told ", TOLD, b"GET /told ", TOLD):
        assert await client.response() == (200, told)


async def test_upgrade_and_close_is_answered_once(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /told HTTP/1.1\r\nupgrade: h2c\r\nconnection: close, upgrade\r\n" + SIZED)
    answer = await client.end()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert answer.endswith(b"\r\n\r\n" + TOLD)


@pytest.mark.parametrize(
    ("start", "status", "error"),
    [
        (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", 505, "http_version"),
        (b"GET / HTTP/3.1\r\nhost: x\r\n\r\n", 505, "http_version"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version"),
        (b"GET /\r\n\r\n", 505, "http_version"),
        (b"POST /echo HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n", 501, "transfer_encoding"),
        (
            b"POST /echo HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            501,
            "transfer_encoding",
        ),
        (
            b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
            400,
            "invalid_http",
        ),
        (
            b"POST /echo HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
            400,
            "invalid_http",
        ),
        (b"POST /echo HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", 400, "invalid_http"),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", 405, "method_not_allowed"),
    ],
)
async def test_unclear_framing_ends_the_connection(
    site: Site, start: bytes, status: int, error: str
) -> None:
    client = await site.connect()
    client.say(start + b"GET /echo HTTP/1.1\r\n\r\n")
    found, body = await client.response()
    assert (found, code(body)) == (status, error)
    assert await client.end() == b""
    assert not site.has_begun.is_set()


async def test_trailers_are_no_headers(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /late HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
    client.say(b"x-request-id: trailer\r\n\r\n")
    client.say(b"GET /echo HTTP/1.1\r\nx-request-id: header\r\n\r\n")
    await site.read_all()
    site.go.set()
    for name in (None, "header"):
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
        assert b"trailer" not in head
        assert name is None or b"x-request-id: header\r\n" in head
        if name is None:
            await client.reader.readexactly(len(b"late"))


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"x-request-id: a-1:b\r\n", b"a-1:b"),
        (b"x-request-id: " + b"x" * 128 + b"\r\n", b"x" * 128),
        *((b, None) for b in (b"", b"x-request-id: \r\n", b"x-request-id: a b\r\n")),
        (b'x-request-id: a"b\r\n', None),
        (b"x-request-id: " + b"x" * 129 + b"\r\n", None),
    ],
)
async def test_answer_has_a_request_id(site: Site, sent: bytes, told: bytes | None) -> None:
    client = await site.connect()
    found = []
    for _ in range(2):
        client.say(b"GET /refuse HTTP/1.1\r\n" + sent + b"\r\n")
        answer = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\nno"), DEADLINE_S)
        found += [line for line in answer.split(b"\r\n") if line.startswith(b"x-request-id: ")]
    if told is None:
        assert len({line for line in found if len(line) > 30}) == 2
    else:
        assert found == [b"x-request-id: " + told] * 2


async def test_what_is_not_http_has_a_request_id(site: Site) -> None:
    client = await site.connect()
    client.say(b"\0\r\n\r\n")
    assert b"\r\nx-request-id: " in await client.end()
