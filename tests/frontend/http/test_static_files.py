"""Files for browsers, over real connections."""

import asyncio
import gzip
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from connection_site import DEADLINE_S, Site

from headrace.frontend.http.request import SHARED_BYTES, HttpExchange
from headrace.frontend.http.static_files import DIST, IDENTITY, StaticFiles

SCRIPT = b"let a = 1;\n" * 100
LONG = b"x" * (8 << 20)  # more than the buffers of two sockets hold
FILES = {
    "index.html": b"<p>page</p>",
    "docs.html": b"<p>reference</p>",
    "ui/main-0123ABCD.js": SCRIPT,
    "ui/main-0123ABCD.js.gz": gzip.compress(SCRIPT, mtime=0),
    "ui/main-0123ABCD.js.br": b"as if by Brotli",
    "docs/icon.svg": b"<svg/>",
    "docs/long.txt": LONG,
    "sources.sha256": b"0",
}
MAIN, GZIP, BROTLI = "/ui/main-0123ABCD.js", "gzip", "gzip, deflate, br;q=0.9"
HTML = {"accept": "text/html,*/*;q=0.8"}


class FileSite(Site):
    """A server of files, and of 404 at other paths."""

    files = StaticFiles({})

    def app(self, request: HttpExchange) -> None:
        file = self.files.find(request)
        if file is None:
            request.respond(404, [], b"")
        else:
            file.respond(request)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return tmp_path


@pytest.fixture
async def site(folder: Path) -> AsyncIterator[FileSite]:
    made = FileSite()
    made.files = StaticFiles.read(folder=folder)
    running = asyncio.create_task(made.run())
    yield made
    await made.stop(running)


@pytest.fixture
async def client(site: FileSite) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{site.port}"
    async with httpx.AsyncClient(base_url=url, headers={"accept-encoding": ""}) as made:
        yield made


async def test_pages_are_at_their_paths(client: httpx.AsyncClient) -> None:
    assert (await client.get("/", headers=HTML)).text == "<p>page</p>"
    assert (await client.get("/docs", headers=HTML)).text == "<p>reference</p>"
    for path in ("/index.html", "/sources.sha256", "/ui", MAIN + ".gz", "/../etc/passwd"):
        assert (await client.get(path)).status_code == 404, path


async def test_root_is_a_page_where_html_is_taken(client: httpx.AsyncClient) -> None:
    statuses = [
        (await client.get("/", headers={"accept": accept})).status_code
        for accept in ("text/html", "*/*", "*", "application/json", "text/event-stream")
    ]
    assert statuses == [200, 200, 200, 404, 404]
    assert (await client.get("/docs", headers={"accept": "application/json"})).status_code == 200


@pytest.mark.parametrize(
    ("accepted", "coding", "body"),
    [
        ("", None, SCRIPT),
        ("identity", None, SCRIPT),
        ("gzip;q=0, br; q=0.000", None, SCRIPT),
        (GZIP, "gzip", FILES["ui/main-0123ABCD.js.gz"]),
        (BROTLI, "br", FILES["ui/main-0123ABCD.js.br"]),
    ],
)
async def test_file_comes_in_the_best_accepted_coding(
    client: httpx.AsyncClient, accepted: str, coding: str | None, body: bytes
) -> None:
    headers = {"accept-encoding": accepted}
    async with client.stream("GET", MAIN, headers=headers) as response:
        assert b"".join([piece async for piece in response.aiter_raw()]) == body
    assert response.headers.get("content-encoding") == coding
    assert response.headers["content-length"] == str(len(body))
    assert "accept-encoding" in response.headers["vary"]


async def test_names_with_a_hash_are_kept_by_browsers(client: httpx.AsyncClient) -> None:
    assert "immutable" in (await client.get(MAIN)).headers["cache-control"]
    for path in ("/", "/docs", "/docs/icon.svg"):
        assert (await client.get(path)).headers["cache-control"] == "no-cache"


async def test_known_file_is_answered_by_304(client: httpx.AsyncClient) -> None:
    etag = (await client.get(MAIN)).headers["etag"]
    for known in (etag, f'"other", W/{etag}', "*"):
        response = await client.get(MAIN, headers={"if-none-match": known})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == etag
        assert response.headers["content-length"] == str(len(SCRIPT))
    for unknown in ('"other"', etag.strip('"')):
        response = await client.get(MAIN, headers={"if-none-match": unknown})
        assert response.status_code == 200


async def test_each_coding_has_an_etag_of_its_own(client: httpx.AsyncClient) -> None:
    head = [await client.head(MAIN, headers={"accept-encoding": c}) for c in ("", GZIP, BROTLI)]
    assert len({response.headers["etag"] for response in head}) == 3
    known = {"if-none-match": head[0].headers["etag"], "accept-encoding": GZIP}
    assert (await client.head(MAIN, headers=known)).status_code == 200


async def test_head_is_a_get_without_its_body(client: httpx.AsyncClient) -> None:
    for path in ("/", MAIN, "/docs/long.txt"):
        got, head = await client.get(path), await client.head(path)
        assert head.content == b""
        for name in ("etag", "content-type", "content-length", "content-security-policy"):
            assert head.headers[name] == got.headers[name]


async def test_slow_readers_share_a_long_body(site: FileSite) -> None:
    assert len(LONG) > SHARED_BYTES
    body = site.files.at("/docs/long.txt").variants[IDENTITY].body
    num_references = sys.getrefcount(body)
    reader = await site.connect()
    reader.say(b"GET /docs/long.txt HTTP/1.1\r\nhost: x\r\n\r\n")
    connection = await site.connection()
    async with asyncio.timeout(DEADLINE_S):
        while not connection.transport.get_write_buffer_size():
            await asyncio.sleep(0)
    assert sys.getrefcount(body) > num_references
    assert await reader.response() == (200, LONG)


async def test_policy_lets_nothing_in_from_elsewhere(client: httpx.AsyncClient) -> None:
    for path in ("/", "/docs", MAIN):
        policy = (await client.get(path)).headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert (await client.get(path)).headers["x-content-type-options"] == "nosniff"


def test_no_ui_leaves_the_api_reference(folder: Path) -> None:
    with_ui = StaticFiles.read(folder=folder).paths
    without = StaticFiles.read(has_ui=False, folder=folder).paths
    assert with_ui - without == {"/", MAIN}
    assert "/docs" in without


@pytest.mark.parametrize("page", ["index.html", "docs.html"])
def test_built_page_loads_only_files_there_are(page: str) -> None:
    html = (DIST / page).read_text()
    loaded = re.findall(r'(?:src|href)="([^"]+)"', html)
    files = [path for path in loaded if path != "openapi.json"]
    assert len(files) >= 3
    for path in files:
        assert (DIST / path).is_file(), path
    assert not re.search(r"<style|style=|<script>|\son\w+=|https?:", html)
