"""A refused request behind others: each of those has its answer, and the refusal is the last."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from connection_site import DEADLINE_S, LARGE, READER_PATIENCE_S, Site, code
from raw_http import parse_answers

from headrace.frontend.http import connection as module

NOT_HTTP = b"\0 not HTTP\r\n\r\n"
LATE = b"POST /late HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
STEPS = b"GET /steps HTTP/1.1\r\n\r\n"
BAD_CHUNK = b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n-1\r\n"


@pytest_asyncio.fixture
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    made = Site(**getattr(request, "param", {}))
    running = asyncio.create_task(made.run())
    yield made
    await made.stop(running)


async def test_refusal_comes_behind_answers_of_every_kind(site: Site) -> None:
    client = await site.connect()
    echo = b"POST /echo HTTP/1.1\r\ncontent-length: 3\r\n\r\none"
    stream = b"POST /stream HTTP/1.1\r\ncontent-length: 2\r\n\r\nbb"
    client.say(LATE + echo + stream + STEPS + b"GET /large HTTP/1.1\r\n\r\n" + NOT_HTTP)
    site.go.set()
    answers = parse_answers(await client.end())
    assert [answer.status for answer in answers] == [200] * 5 + [400]
    assert [a.body for a in answers[:-1]] == [b"late", b"one", b"abbc", b"ab", bytes(LARGE)]
    assert code(answers[-1].body) == "invalid_http"


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (LATE, [b"late"]),
        (
            b"POST /late HTTP/1.1\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n123456789",
            [b"late"],
        ),
        (b"GET /late HTTP/1.1\r\n\r\nGET /echo HTTP/1.1\r\n\r\n", [b"late", b""]),
        (STEPS, [b"ab"]),
    ],
)
@pytest.mark.parametrize("refused", [NOT_HTTP, BAD_CHUNK], ids=["head", "body"])
async def test_refusal_waits_for_answers_that_have_begun(
    site: Site, before: bytes, told: list[bytes], refused: bytes
) -> None:
    client = await site.connect()
    client.say(before)
    await asyncio.wait_for(site.has_begun.wait(), DEADLINE_S)
    client.say(refused + LATE)
    site.go.set()
    answers = parse_answers(await client.end())
    assert [answer.body for answer in answers[:-1]] == told
    assert (answers[-1].status, code(answers[-1].body)) == (400, "invalid_http")


async def test_refusal_of_a_body_gives_up_its_request(site: Site) -> None:
    client = await site.connect()
    client.say(BAD_CHUNK)
    status, body = await client.response()
    assert (status, code(body)) == (400, "invalid_http")
    assert await client.end() == b""


async def test_answered_request_is_not_refused_again(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /refuse HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
    assert await client.response() == (429, b"no")
    client.say(b"-1\r\n")
    assert await client.end() == b""


async def test_late_head_is_refused_behind_a_stream(site: Site) -> None:
    client = await site.connect()
    client.say(STEPS + b"GET /echo HT")
    await asyncio.wait_for(site.has_begun.wait(), DEADLINE_S)
    await site.be_impatient()
    site.go.set()
    answers = parse_answers(await client.end())
    assert [(answer.status) for answer in answers] == [200, 408]
    assert answers[0].body == b"ab"


async def test_half_closed_client_receives_its_rejection(site: Site) -> None:
    client = await site.connect()
    client.say(LATE + STEPS + NOT_HTTP)
    client.writer.write_eof()
    site.go.set()
    answers = parse_answers(await client.end())
    assert [answer.status for answer in answers] == [200, 200, 400]
    await site.is_left()


async def test_client_that_leaves_before_its_refusal_is_noticed(site: Site) -> None:
    client = await site.connect()
    client.say(LATE + LATE + NOT_HTTP)
    await asyncio.wait_for(site.has_begun.wait(), DEADLINE_S)
    client.writer.close()
    await site.is_left()


async def test_refusal_comes_when_answers_before_are_read(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /large HTTP/1.1\r\n\r\n" * 20 + NOT_HTTP)
    for _ in range(20):
        assert await client.response() == (200, bytes(LARGE))
    assert (await client.response())[0] == 400
    assert await client.end() == b""


@pytest.mark.parametrize("site", [{"reader_patience_s": READER_PATIENCE_S}], indirect=True)
async def test_client_that_reads_nothing_before_its_refusal_is_cut(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /large HTTP/1.1\r\n\r\n" * 100 + NOT_HTTP)
    await site.is_left()
    assert 1 <= site.num_large < 20


async def test_what_comes_behind_a_refusal_has_a_limit(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_IGNORED_BYTES", 1000)
    client = await site.connect()
    client.say(LATE + NOT_HTTP)
    await site.read_all()
    client.say(b"x" * 2000)
    assert await client.end() == b""


async def test_refusal_is_read_before_the_connection_is_cut(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /large HTTP/1.1\r\n\r\n" + NOT_HTTP)
    await site.read_all()
    await site.be_impatient()
    assert (await client.response())[0] == 200
    assert (await client.response())[0] == 400
