"""Forwards admitted requests into the ring."""

import asyncio
import time
from collections.abc import Coroutine
from functools import partial
from io import BytesIO
from typing import Any

from starlette.types import Receive

from headrace.board.board import Slot
from headrace.board.fields import FrontendField
from headrace.board.http_counts import HttpCounts, HttpRow
from headrace.errors import DeadlyRequest
from headrace.frontend.admission.body_throttle import BodyThrottle
from headrace.frontend.admission.gate import Gate
from headrace.frontend.http.rejections import Rejection, error_body, too_large
from headrace.frontend.http.request import HttpExchange
from headrace.frontend.http.request_head import Headers
from headrace.frontend.open_requests import OpenRequest, OpenRequests
from headrace.frontend.request_proxy import RequestProxy
from headrace.frontend.request_reports import RequestReports
from headrace.ipc.inflight import InflightRequest
from headrace.ipc.messages import Head, share_key
from headrace.ipc.published_page import PublishedPage
from headrace.ipc.router import LONG_BODY_BYTES, Router
from headrace.routes import ANTHROPIC_PATHS, METRICS, METRICS_TYPE, READS
from headrace.sse import DONE, event_of

JSON = "application/json"
MAX_METRICS_AGE_S = 3.0  # of a page that is published each second while tokenizers are behind
DEADLY = Rejection.of(DeadlyRequest())


class ClientLeft(Exception):
    """The connection was closed before the body was complete."""


class BodyRefused(Exception):
    """There is no room for the rest of a body."""

    def __init__(self, rejection: Rejection) -> None:
        self.rejection = rejection


class Forwarder:
    """Starts a `RequestProxy` for each request when its body is complete."""

    def __init__(
        self,
        open_requests: OpenRequests,
        links: Router,
        slot: Slot,
        gate: Gate,
        max_body_bytes: int,
        pages: dict[str, bytes] | None = None,
        anthropic_pages: dict[str, bytes] | None = None,
        reports: RequestReports | None = None,
        metrics: PublishedPage | None = None,
    ) -> None:
        """Keep the constant responses of some paths: JSON, for two APIs.

        Args:
            metrics: answers `/metrics` while tokenizers are behind.
        """
        self._metrics = metrics
        self._reports = reports
        self._pages = pages or {}
        self._anthropic_pages = anthropic_pages or {}
        self._open_requests = open_requests
        self._links = links
        self._slot = slot
        self._gate = gate
        self._max_body_bytes = max_body_bytes
        self._long_bodies = BodyThrottle(links)
        self._too_large = too_large(max_body_bytes)
        self._counts = HttpCounts(slot.http_words)
        self._counts.settle()
        self._reading: set[asyncio.Task[None]] = set()

    def begin(self, request: HttpExchange, has_admin_key: bool = False) -> None:
        """Admit a request, or answer with the rejection; then its body is not read.

        Args:
            has_admin_key: that of `/admin`, and needs no other.
        """
        self._slot.add(FrontendField.REQUESTS)
        head = request.head
        row = self._counts.row(request.method, request.path)
        row.begin()
        rejection = self._gate.enter(request.method, head, has_admin_key)
        if rejection is not None:
            length = request.refuse(rejection)
            duration_ns = time.monotonic_ns() - request.received_at
            row.end(rejection.status, duration_ns, head.length, length)
            if self._reports is not None:
                self._reports.put(request)
            return
        page = self._page(request)
        if page is not None:
            headers, text = page
            request.respond(200, headers, text)
            row.end(200, time.monotonic_ns() - request.received_at, head.length, len(text))
            if self._reports is not None:
                self._reports.put(request)
            return
        proxy = RequestProxy(
            request,
            self._open_requests.open(head.wants_timing),
            self._links,
            self._slot,
            streams=self._open_requests.streams,
            retry_after_s=lambda: self._gate.retry_after_s,
            on_end=partial(self._end, row, head.length),
        )
        key = 0 if head.key is None else share_key(head.key)
        body = request.take_body() if head.length < LONG_BODY_BYTES else None
        if body is None:
            self._begin_reading(self._read(request, head.length, proxy, key))
        else:
            self._enter(proxy, body, key)

    def _page(self, request: HttpExchange) -> tuple[Headers, bytes] | None:
        """Return the headers and body of a response that waits for no process, or None."""
        if request.method not in READS:
            return None
        if request.path == METRICS and self._metrics is not None and self._links.is_behind:
            page = self._metrics.read(MAX_METRICS_AGE_S)
            if page is None:
                return None
            age = b"%d" % max(0, page.age_s)  # seconds, RFC 9111: a page kept is not a fresh one
            return [(b"content-type", METRICS_TYPE.encode()), (b"age", age)], page.body
        pages = self._anthropic_pages if request.head.is_anthropic else self._pages
        body = pages.get(request.path)
        return None if body is None else ([(b"content-type", JSON.encode())], body)

    def _enter(self, proxy: RequestProxy, body: bytes, key: int) -> None:
        if len(body) > self._max_body_bytes:
            proxy.refuse(self._too_large)
        else:
            proxy.enter(body, key)

    def _end(
        self, row: HttpRow, length: int, request: HttpExchange, open_request: OpenRequest
    ) -> None:
        """Record that a request was answered or dropped."""
        if self._reports is not None:
            request.num_sent += self._open_requests.streams.num_bytes(open_request.id)
        self._open_requests.close(open_request)
        duration_ns = time.monotonic_ns() - request.received_at
        row.end(open_request.status, duration_ns, length, open_request.declared_length)
        if self._reports is not None:
            self._reports.put(request, open_request)

    def _begin_reading(self, reading: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(reading)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _read(
        self, request: HttpExchange, length: int, proxy: RequestProxy, key: int
    ) -> None:
        """Wait for a body that is on its way; a long one waits for its turn."""
        try:
            if length >= LONG_BODY_BYTES:
                async with self._long_bodies.turn(request.receive, length) as receive:
                    body = await self._body_of(receive)
            else:
                body = await self._body_of(request.receive)
        except ClientLeft:
            proxy.end()
        except BodyRefused as refused:
            proxy.refuse(refused.rejection)
        else:
            rejection = self._gate.refuse_late(request.method, len(body))
            if rejection is None:
                self._enter(proxy, body, key)
                self._links.flush()
            else:
                proxy.refuse(rejection)

    async def _body_of(self, receive: Receive) -> bytes:
        """Receive a body, up to its limit. It counts as held until it is whole."""
        body = BytesIO()  # grows without being copied; joined at the end, others would wait for it
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                chunk = message.get("body", b"")
                size += len(chunk)
                self._slot.add(FrontendField.HELD_BYTES, len(chunk))
                body.write(chunk)
                if size > self._max_body_bytes or not message.get("more_body"):
                    return body.getvalue()
                rejection = self._gate.refuse_more(size)
                if rejection is not None:
                    raise BodyRefused(rejection)
        finally:
            self._slot.add(FrontendField.HELD_BYTES, -size)

    def resend(self) -> None:
        """Send again what processes had that have died and been replaced."""
        self._links.resend(self._open_requests, self._fail)

    def _fail(self, sent: InflightRequest) -> None:
        """Fail a request at which processes die, whichever it is sent to."""
        path = sent.request.path
        body = error_body(DEADLY, path)
        is_anthropic = path.startswith(ANTHROPIC_PATHS)
        event = event_of(body, "error") if is_anthropic else event_of(body) + DONE
        self._open_requests.fail(sent, Head(DEADLY.status, JSON), body, event)
