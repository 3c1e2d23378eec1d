"""What is fetched and what is refused, at the first host and after each redirect."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
import trustme

from headrace.config.media_domains import read_domain
from headrace.tokenizer_proc.fetcher import download
from headrace.tokenizer_proc.fetcher.download import (
    MAX_REDIRECTS,
    Budget,
    DownloadedFile,
    DownloadRefused,
    Downloads,
)

ADDRESSES = {
    "a.com": ["93.184.215.14"],
    "two.com": ["2606:4700::1", "93.184.215.14"],
    "mixed.com": ["93.184.215.14", "10.0.0.1"],
    "loop.com": ["127.0.0.1"],
    "near.lan": ["10.0.0.1"],
    "meta.lan": ["169.254.169.254"],
    "127.1": ["127.0.0.1"],
}
DOMAINS = [*ADDRESSES, "near.lan:8080", "meta.lan:80", "gone.com"]
PNG = b"\x89PNG and so on"
URL = "https://a.com/x.png"
Answer = Callable[[httpx.Request], httpx.Response]


def image(_request: httpx.Request) -> httpx.Response:
    headers = {"content-type": "Image/PNG; q=1"}
    return httpx.Response(200, headers=headers, stream=httpx.ByteStream(PNG))


def with_headers(headers: dict[str, str], status: int = 200, content: Any = b"") -> Answer:
    return lambda _request: httpx.Response(status, headers=headers, content=content)


def to(*urls: str) -> Answer:
    """Answer with redirects, one after another, then with an image."""
    left = list(urls)
    return lambda request: (
        httpx.Response(302, headers={"location": left.pop(0)}) if left else image(request)
    )


def fetch(
    url: str, answer: Answer = image, max_bytes: int = 1000, **options: Any
) -> DownloadedFile:
    async def resolve(host: str, _port: int) -> Sequence[str]:
        return ADDRESSES.get(host, [])

    async def run() -> DownloadedFile:
        domains = [read_domain(text) for text in DOMAINS]
        downloads = Downloads(domains, resolve, httpx.MockTransport(answer), **options)
        try:
            return await downloads.fetch(url, Budget(max_bytes))
        finally:
            await downloads.close()

    return asyncio.run(run())


def refusal(url: str, answer: Answer = image, **options: Any) -> str:
    with pytest.raises(DownloadRefused) as refused:
        fetch(url, answer, **options)
    return str(refused.value)


def test_an_image_comes_from_the_address_that_was_looked_at() -> None:
    seen: list[httpx.Request] = []
    assert fetch("HTTPS://A.com/x?y#z", lambda r: (seen.append(r), image(r))[1]) == DownloadedFile(
        PNG, "image/png"
    )
    (request,) = seen
    assert str(request.url) == "https://93.184.215.14/x?y#z"
    assert request.headers["host"] == "a.com"
    assert request.extensions["sni_hostname"] == "a.com"
    assert not {"cookie", "authorization", "referer"} & request.headers.keys()


def test_the_next_address_is_asked_where_one_cannot_be_reached() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host.startswith("2606"):
            raise httpx.ConnectError("no route")
        return image(request)

    assert fetch("https://two.com/", answer).data == PNG


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://b.com/", "b.com is none of this server's --allowed-media-domains"),
        ("https://a.com.evil.com/", "a.com.evil.com is none of"),
        ("https://a.com:8443/", "a.com:8443 is none of"),
        ("https://evil.com\\@a.com/", "has a name or a password in it"),
        ("https://me:secret@a.com/", "has a name or a password in it"),
        ("https://loop.com/", "loop.com is not at a public address"),
        ("https://mixed.com/", "mixed.com is not at a public address"),
        ("http://near.lan/", "near.lan is not at a public address"),
        ("http://127.1/", "127.1 is not at a public address"),
        ("http://meta.lan:80/", "meta.lan is not at a public address"),
        ("https://gone.com/", "there is no host gone.com"),
        ("file:///etc/passwd", "is neither http nor https"),
        ("http://[::1", "is no URL"),
        ("https:///x", "is none of"),
        ("https://a.com/" + "x" * 9000, "has more than 8192 characters"),
    ],
)
def test_what_is_refused_is_not_asked_for(url: str, why: str) -> None:
    def never(_request: httpx.Request) -> httpx.Response:
        raise AssertionError("it was asked for")

    assert why in refusal(url, never)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://169.254.169.254/latest", "169.254.169.254 is none of"),
        ("http://loop.com/", "loop.com is not at a public address"),
        ("//near.lan/x", "near.lan is not at a public address"),
        ("ftp://a.com/", "is neither http nor https"),
        ("https://me@a.com/", "has a name or a password in it"),
    ],
)
def test_a_redirect_goes_nowhere_that_a_url_may_not(url: str, why: str) -> None:
    assert why in refusal(URL, to(url))
    assert why in refusal(URL, to("/again", "https://two.com/", url))


def test_redirects_are_followed_and_not_for_ever() -> None:
    assert fetch(URL, to(*["/next"] * MAX_REDIRECTS)).data == PNG
    assert "more than 3 times" in refusal(URL, to(*["/next"] * (MAX_REDIRECTS + 1)))


def test_a_server_that_is_named_with_its_port_may_be_nearby() -> None:
    assert fetch("http://near.lan:8080/x").data == PNG
    assert "not at a public address" in refusal("http://near.lan/x")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (with_headers({"content-type": "text/html"}), "says that it is text/html, not an image"),
        (with_headers({}), "says that it is nothing, not an image"),
        (with_headers({"content-type": "image/png"}, 404), "its server answers 404"),
        (with_headers({"content-type": "image/png"}, 302), "its server answers 302"),
        (
            with_headers({"content-type": "image/png", "content-encoding": "br"}),
            "sends it compressed",
        ),
        (
            with_headers({"content-type": "image/png", "content-length": str(21 << 20)}),
            "more than the 20971520 bytes of an image",
        ),
        (to("http://[::1"), "does not answer as it should"),
    ],
)
def test_what_is_no_image_is_refused(answer: Answer, why: str) -> None:
    assert why in refusal(URL, answer)


def test_a_server_that_breaks_off_is_refused() -> None:
    def broken(_request: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("nonsense")

    assert "does not answer as it should" in refusal(URL, broken)


def test_what_is_too_long_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_read
        while True:
            num_read += 1
            yield bytes(100)

    monkeypatch.setattr(download, "MAX_IMAGE_BYTES", 350)
    endless_image = with_headers({"content-type": "image/png"}, content=endless())
    assert "more than the 350 bytes of an image" in refusal(URL, endless_image)
    assert num_read == 4
    endless_image = with_headers({"content-type": "image/png"}, content=endless())
    assert "beside the other images" in refusal(URL, endless_image, max_bytes=150)
    assert num_read == 6


def test_a_server_that_does_not_answer_is_not_waited_for() -> None:
    async def silent(_request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    assert "was not there within 0.01 s" in refusal(URL, silent, time_s=0.01)  # type: ignore[arg-type]


async def test_certificate_is_checked_by_name_not_by_address() -> None:
    authority = trustme.CA()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("a.lan").configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nConnection: close\r\n\r\n")
        writer.write(PNG)
        writer.close()

    async def resolve(_host: str, _port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=theirs) as server:
        port = server.sockets[0].getsockname()[1]
        domains = [read_domain(f"{host}:{port}") for host in ("a.lan", "b.lan")]
        downloads = Downloads(domains, resolve, httpx.AsyncHTTPTransport(verify=ours))
        file = await downloads.fetch(f"https://a.lan:{port}/", Budget(1000))
        assert file.data == PNG
        with pytest.raises(DownloadRefused, match="does not answer as it should"):
            await downloads.fetch(f"https://b.lan:{port}/", Budget(1000))
        await downloads.close()
