"""One image from its URL: where it may come from, how large it may be, how long it may take.

A host is resolved once for each request, and the connection goes to an address that has been looked
at: a name that means another address a moment later changes nothing. Redirects are followed here,
each looked at as the URL was.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

from headrace.config.config import MAX_IMAGE_BYTES
from headrace.config.media_domains import MediaDomain, allowed_domain
from headrace.tokenizer_proc.fetcher.addresses import is_for_one, is_public

TIME_S = 5.0  # of an image, redirects included; vLLM's default
MAX_REDIRECTS = 3
MAX_URL = 8192  # characters; some servers take no more
REDIRECTS = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "headrace"}

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
log = logging.getLogger(__name__)


class DownloadRefused(Exception):
    """An image is not fetched; the text, fit for the client, continues the name of its part."""


@dataclass
class Budget:
    """Bytes that the images of a request may still have, together."""

    left: int

    def take(self, num_bytes: int) -> None:
        """Count bytes.

        Raises:
            Refused: there are more than there may be.
        """
        self.left -= num_bytes
        if self.left < 0:
            raise DownloadRefused("is too large beside the other images (--max-body-bytes)")


@dataclass(frozen=True)
class DownloadedFile:
    """The result of a URL."""

    data: bytes
    mime_type: str  # as the server says


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host, the best one first."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(where[0]) for *_, where in found]


class Downloads:
    """Fetches images from hosts that are allowed. It sends neither cookies nor credentials.

    Args:
        transport: connects; keeps no connection, since those are known by address, not by host.
    """

    def __init__(
        self,
        domains: Sequence[MediaDomain],
        resolve: Resolve = resolve,
        transport: httpx.AsyncBaseTransport | None = None,
        time_s: float = TIME_S,
    ) -> None:
        self._domains = domains
        self._resolve = resolve
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._transport = transport or httpx.AsyncHTTPTransport(limits=limits)
        self._time_s = time_s

    async def fetch(self, url: str, budget: Budget) -> DownloadedFile:
        """Return the image at a URL.

        Raises:
            Refused: it is not to be fetched, or cannot be.
        """
        try:
            async with asyncio.timeout(self._time_s):
                return await self._follow(url, budget)
        except TimeoutError:
            raise DownloadRefused(f"was not there within {self._time_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            log.debug("%.100s: %r", url, error)
            raise DownloadRefused(
                "cannot be fetched: its server does not answer as it should"
            ) from error

    async def _follow(self, text: str, budget: Budget) -> DownloadedFile:
        url = url_of(text)
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._get(url, await self._addresses(url))
            try:
                if response.status_code not in REDIRECTS or "location" not in response.headers:
                    return await self._read(response, budget)
                url = url_of(str(url.join(response.headers["location"])))
            finally:
                await response.aclose()
        raise DownloadRefused(f"is redirected more than {MAX_REDIRECTS} times")

    async def _addresses(self, url: httpx.URL) -> Sequence[str]:
        """Return where the server of a URL is, if it may be asked."""
        host, port = host_of(url), PORTS[url.scheme]
        domain = allowed_domain(self._domains, host, url.port, port)
        if domain is None:
            where = host if url.port is None else f"{host}:{url.port}"
            raise DownloadRefused(f"{where[:100]} is none of this server's --allowed-media-domains")
        try:
            found = await self._resolve(host, url.port or port)
        except (OSError, UnicodeError):
            found = ()
        if not found:
            raise DownloadRefused(f"there is no host {host[:100]}")
        is_fine = is_public if domain.port is None else is_for_one
        if not all(map(is_fine, found)):
            raise DownloadRefused(f"{host[:100]} is not at a public address")
        return found

    async def _get(self, url: httpx.URL, addresses: Sequence[str]) -> httpx.Response:
        """Ask at the first address that there is a connection to."""
        headers = HEADERS | {"Host": url.netloc.decode("ascii")}
        more = {"sni_hostname": host_of(url)}  # whose certificate it is to be
        for address in addresses:
            request = httpx.Request("GET", url.copy_with(host=address), headers=headers)
            request.extensions = more
            try:
                return await self._transport.handle_async_request(request)
            except httpx.ConnectError as error:
                failure = error
        raise failure

    async def _read(self, response: httpx.Response, budget: Budget) -> DownloadedFile:
        """Return what a server sends, if it is an image of a size that is taken."""
        if response.status_code != httpx.codes.OK:
            raise DownloadRefused(f"its server answers {response.status_code}")
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not kind.startswith("image/"):
            raise DownloadRefused(
                f"its server says that it is {kind[:40] or 'nothing'}, not an image"
            )
        if response.headers.get("content-encoding", "identity") != "identity":
            raise DownloadRefused("its server sends it compressed; it must send it as it is")
        length = response.headers.get("content-length", "0")
        check_size(int(length) if length.isdecimal() else 0)
        data = bytearray()
        async for piece in response.aiter_raw():
            budget.take(len(piece))
            data += piece
            check_size(len(data))
        return DownloadedFile(bytes(data), kind)

    async def close(self) -> None:
        """Drop all connections."""
        await self._transport.aclose()


def url_of(text: str) -> httpx.URL:
    """Return a URL that may be fetched, judged by its text alone."""
    if len(text) > MAX_URL:
        raise DownloadRefused(f"has more than {MAX_URL} characters")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        raise DownloadRefused("is no URL") from None
    if url.scheme not in PORTS:
        raise DownloadRefused("is neither http nor https; use one of them")
    if url.userinfo:
        raise DownloadRefused("has a name or a password in it; leave them out")
    return url


def host_of(url: httpx.URL) -> str:
    """Return the host of a URL as it is resolved, in ASCII."""
    return url.raw_host.decode("ascii").lower()


def host_in(text: str) -> str:
    """Return the host of a URL; none of one that will be refused."""
    try:
        return host_of(url_of(text))
    except DownloadRefused:
        return ""


def check_size(num_bytes: int) -> None:
    """Refuse more bytes than an image may have."""
    if num_bytes > MAX_IMAGE_BYTES:
        raise DownloadRefused(f"has more than the {MAX_IMAGE_BYTES} bytes of an image")
