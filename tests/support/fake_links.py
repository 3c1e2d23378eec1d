"""A frontend's links that lead nowhere."""

import asyncio

from headrace.ipc.inflight import InflightRequest
from headrace.ipc.messages import HttpRequest
from headrace.ipc.router import Router


class FakeLinks(Router):
    """Keeps sent messages. Links in `full` refuse."""

    def __init__(self) -> None:
        self.forwarded: asyncio.Queue[tuple[HttpRequest, bytes]] = asyncio.Queue()
        self.aborted: list[int] = []
        self.full = False
        self.behind = False

    def forward(self, sent: InflightRequest) -> bool:
        if not self.full:
            self.forwarded.put_nowait((sent.request, sent.body))
        return not self.full

    @property
    def is_behind(self) -> bool:
        return self.behind

    def flush(self) -> None:
        pass

    def abort(self, sent: InflightRequest) -> None:
        self.aborted.append(sent.request.id)
