"""The application, asked as uvicorn asks it, with the ring played by the test."""

import json
from pathlib import Path
from typing import Any

import pytest
from frontend_site import LIMIT, MAX_REQUESTS, Client, Site

from headrace.board.board import State, Timing
from headrace.board.fields import EngineField, FrontendField
from headrace.board.http_counts import CLIENT_LEFT, HttpCounts
from headrace.frontend.http.cors import Cors
from headrace.frontend.http.request import Headers
from headrace.frontend.open_requests import MAX_UNSENT_BYTES
from headrace.ipc.messages import Head, Times
from headrace.ipc.published_page import PublishedPage
from headrace.routes import METRICS, METRICS_TYPE

Message = dict[str, Any]


JSON = Head(200, "application/json")
EVENTS = Head(200, "text/event-stream")


@pytest.fixture
def site() -> Site:
    return Site()


def answered(site: Site) -> dict[int, int]:
    row = HttpCounts(site.slot.http_words).row("POST", "/v1/completions")
    return {status: count for status, count in row.responses.items() if count}


async def test_the_body_goes_on_as_it_came(site: Site) -> None:
    site.ask(Client(b'{"a"', b"", b": not JSON", path="/v1/é"))
    request, body = await site.forwarded()
    assert (request.method, request.path) == ("POST", "/v1/é")
    assert body == b'{"a": not JSON'


def test_a_body_that_is_there_goes_on_at_once(site: Site) -> None:
    site.ask(Client(b"{}"))
    _, body = site.links.forwarded.get_nowait()
    assert body == b"{}"


async def test_requests_with_one_api_key_share_its_part(site: Site) -> None:
    keys = []
    for name, value in [
        (b"x-other", b"a"),
        *[(b"authorization", b"Bearer " + k) for k in (b"a", b"a", b"b")],
    ]:
        site.ask(Client(b"{}", headers=((name, value),)))
        request, _ = await site.forwarded()
        keys.append(request.key)
    no_key, mine, again, yours = keys
    assert no_key == 0
    assert mine == again != yours
    assert mine and yours


async def test_metrics_are_the_published_page_while_behind(tmp_path: Path) -> None:
    page = PublishedPage(str(tmp_path), "metrics")
    site = Site(b"key", metrics=page)
    allowed = ((b"authorization", b"Bearer key"),)

    def ask(headers: Headers = allowed) -> Client:
        return site.ask(Client(b"", path=METRICS, method="GET", headers=headers))

    site.links.behind = True
    ask()
    assert (await site.forwarded())[0].path == METRICS  # nothing is published yet
    page.write(b"up 1\n")
    client = ask()
    assert (client.status, client.body) == (200, b"up 1\n")
    assert client.response_head[b"content-type"] == METRICS_TYPE.encode()
    assert client.response_head[b"age"] == b"0"
    assert ask(headers=()).status == 401
    assert site.links.forwarded.empty()
    site.links.behind = False
    ask()
    assert (await site.forwarded())[0].path == METRICS


async def test_a_whole_answer_has_its_status_type_and_length(site: Site) -> None:
    client = site.ask(Client(b"{}"))
    request, _ = await site.forwarded()
    site.answer(request.id, b'{"error": 1}', True, Head(404, "application/json"))
    assert (client.status, answered(site)) == (404, {404: 1})
    assert (client.response_head, client.length) == ({b"content-type": b"application/json"}, 12)
    assert client.pieces == [b'{"error": 1}']
    assert client.is_complete
    client.leave()
    assert site.links.aborted == []
    assert len(site.open_requests) == 0


async def test_a_stream_is_written_as_it_comes(site: Site) -> None:
    client = site.ask(Client(b"{}"))
    request, _ = await site.forwarded()
    site.answer(request.id, b"one", False, EVENTS)
    assert client.response_head[b"content-type"] == b"text/event-stream"
    assert client.length is None
    assert (client.pieces, client.is_complete) == ([b"one"], False)
    site.answer(request.id, b"two", False)
    assert client.pieces == [b"one", b"two"]
    site.answer(request.id, b"", False)
    site.answer(request.id, b"three", True)
    assert (client.body, client.is_complete) == (b"onetwothree", True)
    assert site.links.aborted == []
    assert site.slot[FrontendField.BYTES_OUT] == len(client.body)


async def test_a_client_that_reads_on_gets_everything_in_order(site: Site) -> None:
    client = site.ask(Client(b"{}"))
    request, _ = await site.forwarded()
    site.answer(request.id, b"1", False, EVENTS)
    client.reads = False
    for piece in (b"2", b"3"):
        site.answer(request.id, piece, False)
    assert client.pieces == [b"1"]
    client.read_on()
    assert client.pieces == [b"1", b"23"]
    site.answer(request.id, b"4", False)
    site.answer(request.id, b"5", True)
    assert client.pieces == [b"1", b"23", b"4", b"5"]
    assert client.is_complete


@pytest.mark.parametrize("last", [b"", b"three"])
async def test_response_that_ends_unread_waits_for_the_client(site: Site, last: bytes) -> None:
    client = site.ask(Client(b"{}"))
    request, _ = await site.forwarded()
    client.reads = False
    site.answer(request.id, b"one", False, EVENTS)
    site.answer(request.id, b"two", False)
    site.answer(request.id, last, True)
    assert (client.pieces, len(site.open_requests)) == ([], 1)
    client.read_on()
    assert client.pieces == [b"onetwo" + last]
    assert (client.is_complete, len(site.open_requests)) == (True, 0)


async def test_a_client_that_reads_too_slowly_is_cut_off(site: Site) -> None:
    client = site.ask(Client(b"{}"))
    request, _ = await site.forwarded()
    client.reads = False
    site.answer(request.id, b"one", False, EVENTS)
    site.answer(request.id, bytes(MAX_UNSENT_BYTES + 1), False)
    assert client.is_broken
    assert not client.is_complete
    assert site.links.aborted == [request.id]
    site.answer(request.id, b"late", True)
    assert client.pieces == []


@pytest.mark.parametrize("pieces", [[], [b"one"]])
async def test_a_client_that_leaves_aborts_its_request(site: Site, pieces: list[bytes]) -> None:
    client = site.ask(Client(b"{}"))
    request, _ = await site.forwarded()
    for piece in pieces:
        site.answer(request.id, piece, False, EVENTS)
    client.leave()
    assert site.links.aborted == [request.id]
    assert len(site.open_requests) == 0
    assert site.slot[FrontendField.DISCONNECTS] == 1
    assert site.slot[FrontendField.RESPONSES] == site.slot[FrontendField.KEPT_BYTES] == 0
    client.leave()
    assert site.links.aborted == [request.id], "once is enough"


async def test_a_server_that_stops_parts_from_its_clients(site: Site) -> None:
    client = site.ask(Client(b"{}"))
    await site.forwarded()
    for open_request in site.open_requests:
        open_request.drop()
    assert client.is_broken


async def test_disconnect_before_the_body_forgets_the_request(site: Site) -> None:
    client = site.ask(Client(b"{", has_all=False))
    await client.all_read()
    client.leave()
    await client.all_read()
    assert (client.status, answered(site)) == (0, {CLIENT_LEFT: 1})
    assert site.links.forwarded.empty()
    assert site.links.aborted == []


def test_a_body_declared_too_large_is_refused_unread(site: Site) -> None:
    client = site.ask(Client(has_all=False, headers=((b"content-length", b"101"),)))
    assert (client.status, answered(site)) == (413, {413: 1})
    error = json.loads(client.body)["error"]
    assert error["code"] == "body_too_large"
    assert "100 bytes (--max-body-bytes)" in error["message"]


@pytest.mark.parametrize("chunks", [(b"x" * 60, b"x" * 41, b"x"), (b"x" * 101,)])
async def test_a_body_that_grows_too_large_is_refused(site: Site, chunks: list[bytes]) -> None:
    client = site.ask(Client(*chunks, headers=((b"content-length", b"nonsense"),)))
    await client.answered()
    assert (client.status, answered(site)) == (413, {413: 1})
    assert site.links.forwarded.empty()
    assert site.slot[FrontendField.HELD_BYTES] == 0


async def test_a_body_of_just_the_limit_is_taken(site: Site) -> None:
    site.ask(Client(b"x" * LIMIT, headers=((b"content-length", b"100"),)))
    _, body = await site.forwarded()
    assert len(body) == LIMIT


def test_full_links_are_answered_with_try_again(site: Site) -> None:
    site.links.full = True
    client = site.ask(Client(b"{}"))
    assert (client.status, answered(site)) == (503, {503: 1})
    assert client.response_head[b"retry-after"] == b"1"
    assert json.loads(client.body)["error"]["code"] == "overloaded"
    assert len(site.open_requests) == 0


async def test_traffic_is_counted(site: Site) -> None:
    site.ask(Client(b"12345"))
    request, _ = await site.forwarded()
    assert site.slot[FrontendField.KEPT_BYTES] == 5
    site.answer(request.id, b"123", False, EVENTS)
    site.answer(request.id, b"4567", True)
    names = ("REQUESTS", "RESPONSES", "DISCONNECTS", "BYTES_IN", "BYTES_OUT")
    assert [site.slot[FrontendField[name]] for name in names] == [1, 1, 0, 5, 7]
    assert site.slot[FrontendField.KEPT_BYTES] == 0
    assert answered(site) == {200: 1}


async def test_concurrent_requests_get_their_own_answers(site: Site) -> None:
    clients = [site.ask(Client(str(i).encode())) for i in range(20)]
    requests = [await site.forwarded() for _ in clients]
    for request, body in reversed(requests):
        site.answer(request.id, b"answer " + body, True, JSON)
    assert [c.body for c in clients] == [f"answer {i}".encode() for i in range(20)]


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (b"", 401),
        (b"Bearer", 401),
        (b"Bearer wrong", 401),
        (b"Basic right", 401),
        (b"right", 401),
        (b"Bearer right", 200),
        (b"bearer  other ", 200),
    ],
)
async def test_only_those_with_a_key_come_in(authorization: bytes, status: int) -> None:
    site = Site(b"right", b"other")
    client = site.ask(Client(b"{}", headers=((b"authorization", authorization),)))
    if status == 200:
        request, _ = await site.forwarded()
        site.answer(request.id, b"", True, JSON)
    assert client.status == status
    assert site.slot[FrontendField.UNAUTHORIZED] == (status == 401)
    assert (client.response_head.get(b"www-authenticate") == b"Bearer") == (status == 401)


def test_a_refusal_is_in_the_words_of_the_api() -> None:
    site = Site(b"right")
    client = site.ask(Client(path="/v1/messages", headers=((b"x-api-key", b"wrong"),)))
    assert client.status == 401
    body = json.loads(client.body)
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")


async def test_draining_frontend_finishes_open_requests_only(site: Site) -> None:
    for slot in site.board.slots:
        slot.enter(State.READY)
    early = site.ask(Client(b"{}"))
    request, _ = await site.forwarded()
    site.gate.is_closed = True
    late = site.ask(Client(b"{}"))
    assert (late.status, late.response_head[b"retry-after"]) == (503, b"1")
    assert json.loads(late.body)["error"]["code"] == "stopping"
    ready, health = (site.ask(Client(path=path, method="GET")) for path in ("/ready", "/health"))
    assert (ready.status, health.status) == (503, 200)
    site.answer(request.id, b"answered", True, JSON)
    assert (early.status, early.body) == (200, b"answered")


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_health_needs_no_key(path: str) -> None:
    site = Site(b"right")
    client = site.ask(Client(path=path, method="GET"))
    assert client.status == 503
    assert "engine 0 is absent" in json.loads(client.body)["reasons"]


def test_a_ping_may_be_posted(site: Site) -> None:
    assert site.ask(Client(path="/ping", method="POST")).status == 503


def test_health_is_only_asked_for(site: Site) -> None:
    client = site.ask(Client(path="/health", method="POST"))
    assert (client.status, client.response_head[b"allow"]) == (405, b"GET, HEAD")
    assert site.ask(Client(path="/health", method="HEAD")).status == 503


@pytest.mark.parametrize("what", ["requests", "tokens", "bytes"])
def test_overload_is_answered_before_the_body_is_read(site: Site, what: str) -> None:
    if what == "requests":
        site.slot[FrontendField.ADMITTED] = MAX_REQUESTS
    elif what == "tokens":
        site.board.slot("engine")[EngineField.WAITING_TOKENS] = 1000
    else:
        site.slot[FrontendField.KEPT_BYTES] = 10 * LIMIT
    client = site.ask(Client(has_all=False, headers=((b"content-length", b"5"),)))
    assert client.status == 429
    assert int(client.response_head[b"retry-after"]) > 0
    assert json.loads(client.body)["error"]["code"] == "rate_limit_exceeded"
    assert site.slot[FrontendField.OVERLOADS] == 1
    by_limit = [
        site.slot[FrontendField.REQUEST_OVERLOADS],
        site.slot[FrontendField.TOKEN_OVERLOADS],
    ]
    assert by_limit == [what == "requests", what == "tokens"]


async def test_info_routes_are_answered_under_load(site: Site) -> None:
    site.slot[FrontendField.ADMITTED] = MAX_REQUESTS
    client = site.ask(Client(b"", path="/metrics", method="GET"))
    request, _ = await site.forwarded()
    site.answer(request.id, b"all is well", True, JSON)
    assert client.status == 200


async def test_bodies_count_while_they_are_read(site: Site) -> None:
    client = site.ask(Client(b"123", b"45", has_all=False))
    await client.all_read()
    assert site.slot[FrontendField.HELD_BYTES] == 5
    client.leave()
    await client.all_read()
    assert site.slot[FrontendField.HELD_BYTES] == 0
    assert (site.slot[FrontendField.OPEN_REQUESTS], site.slot[FrontendField.ADMITTED]) == (0, 0)


async def test_body_that_outgrows_the_room_is_refused(site: Site) -> None:
    alone = site.ask(Client(b"x" * LIMIT, has_all=False))
    await alone.all_read()
    assert alone.status == 0
    others = [site.ask(Client(b"x" * 90, has_all=False)) for _ in range(11)]
    for other in others:
        await other.all_read()
    assert [other.status for other in others] == [0] * 10 + [429]
    assert json.loads(others[10].body)["error"]["code"] == "rate_limit_exceeded"
    assert int(others[10].response_head[b"retry-after"]) > 0
    assert site.slot[FrontendField.HELD_BYTES] == 10 * LIMIT
    assert (site.slot[FrontendField.ADMITTED], site.slot[FrontendField.OVERLOADS]) == (0, 1)
    assert answered(site) == {429: 1}


async def test_slow_bodies_take_no_place(site: Site) -> None:
    slow = [site.ask(Client(b"{", has_all=False)) for _ in range(MAX_REQUESTS)]
    for client in slow:
        await client.all_read()
    site.ask(Client(b"{}"))
    request, _ = await site.forwarded()
    assert site.slot[FrontendField.ADMITTED] == 1
    site.slot[FrontendField.ADMITTED] = MAX_REQUESTS
    slow[0].send_rest(b"}")
    await slow[0].answered()
    assert (slow[0].status, int(slow[0].response_head[b"retry-after"]) > 0) == (429, True)
    assert site.slot[FrontendField.REQUEST_OVERLOADS] == 1
    site.answer(request.id, b"{}", True, JSON)
    assert site.slot[FrontendField.ADMITTED] == MAX_REQUESTS - 1
    slow[1].send_rest(b"}")
    assert (await site.forwarded())[1] == b"{}"


async def test_an_answer_may_bring_headers_of_its_own(site: Site) -> None:
    client = site.ask(Client(b"{}"))
    request, _ = await site.forwarded()
    site.answer(request.id, b"", True, Head(405, "application/json", None, [("allow", "GET")]))
    assert client.response_head[b"allow"] == b"GET"
    assert b"retry-after" not in client.response_head


async def test_full_engine_queue_gives_retry_after(site: Site) -> None:
    client = site.ask(Client(b"{}"))
    request, _ = await site.forwarded()
    site.answer(request.id, b"{}", True, Head(429, "application/json"))
    assert int(client.response_head[b"retry-after"]) > 0


async def test_responses_without_the_engine_are_not_engine_requests(site: Site) -> None:
    site.ask(Client(b"", method="GET", path="/v1/models"))
    request, _ = await site.forwarded()
    site.answer(request.id, b"{}", True, Head(200, "application/json"))
    assert not sum(site.slot.histogram(Timing.WHOLE).counts)


TIMES = [10, 21, 33, 46, 60, 75, 91]


@pytest.mark.parametrize("is_asked", [True, False])
async def test_hops_are_counted_and_reported_on_demand(site: Site, is_asked: bool) -> None:
    headers = ((b"x-request-timing", b"1"),) if is_asked else ()
    client = site.ask(Client(b"{}", headers=headers))
    request, _ = await site.forwarded()
    ms = 1_000_000
    times = Times(*(client.received_at + at * ms for at in TIMES), model=1)
    site.answer(request.id, b"one", False, Head(200, "text/event-stream", times))
    site.answer(request.id, b"two", True)
    expected = (
        "accept;dur=10.000, parse;dur=11.000, tokenize;dur=12.000, submit;dur=13.000, "
        "queue;dur=14.000, prefill;dur=15.000, render;dur=16.000"
    )
    assert client.response_head.get(b"server-timing") == (expected.encode() if is_asked else None)
    for span in Timing:
        if Timing.LOOP_LAG < span <= Timing.WHOLE:
            assert sum(site.slot.of_model(1).histogram(span).counts) == 1, span
            assert not sum(site.slot.histogram(span).counts), span
    first_token = site.slot.of_model(1).histogram(Timing.FIRST_TOKEN)
    assert first_token.sum == pytest.approx(0.091)


ORIGIN = (b"origin", b"https://a.example")
ASKED = (b"access-control-request-method", b"POST")


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [
        (["*"], b"*"),
        (["https://a.example"], b"https://a.example"),
        (["https://b.example"], None),
    ],
)
def test_pages_of_other_sites_may_call_where_that_is_allowed(
    origins: list[str], allowed: bytes | None
) -> None:
    site = Site(b"right", cors=Cors(origins))
    asked = site.ask(Client(method="OPTIONS", headers=(ORIGIN, ASKED)))
    assert asked.status == (200 if allowed else 400)
    refused = site.ask(Client(b"{}", headers=(ORIGIN,)))
    assert refused.status == 401
    for client in (asked, refused):
        headers = dict(client.common) | client.response_head
        assert headers.get(b"access-control-allow-origin") == allowed
    elsewhere = site.ask(Client(b"{}"))
    assert not elsewhere.common


async def test_faults_of_a_head_are_refused_everywhere(site: Site) -> None:
    for path in ("/v1/completions", "/health", "/admin/processes"):
        assert site.ask(Client(b"", path=path, method="GET", host=None)).status == 400
    assert site.ask(Client(b"{}", content_type=b"text/plain")).status == 415
    assert answered(site) == {415: 1}
    assert site.links.forwarded.empty()
