"""Long bodies wait for their turn; a slow one blocks no other."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from headrace.frontend.admission import body_throttle as module
from headrace.frontend.admission.body_throttle import (
    FAST_BYTES,
    MAX_BACKLOG_BYTES,
    READERS,
    BodyThrottle,
    BodyTurn,
)
from headrace.ipc.router import HUGE_BODY_BYTES, LONG_BODY_BYTES, Router

DEADLINE_S = 120
FAST = bytes(FAST_BYTES)


class FakeLinks(Router):
    """A backlog of long bodies."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.looks = 0

    def long_backlog(self) -> int:
        self.looks += 1
        return self.num_bytes


class Client:
    """Sends pieces when told to, and notes when it is read."""

    def __init__(self, bodies: BodyThrottle, length: int = HUGE_BODY_BYTES) -> None:
        self._length = length
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self.has_turn = asyncio.Event()
        self.task = asyncio.create_task(self._be_read(bodies))

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": await self.pieces.get()}

    async def _be_read(self, bodies: BodyThrottle) -> bytes:
        last = b""
        async with bodies.turn(self._receive, self._length) as receive:
            self.has_turn.set()
            while piece := (await receive())["body"]:
                last = piece
        return last

    async def finish(self) -> bytes:
        self.pieces.put_nowait(b"")
        return await self.task


@pytest.fixture
def links() -> FakeLinks:
    return FakeLinks()


async def has_turn(client: Client) -> None:
    await asyncio.wait_for(client.has_turn.wait(), DEADLINE_S)


async def test_late_long_body_waits_for_another_to_end(
    links: FakeLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[BodyTurn] = []
    check_later = BodyTurn._check_later

    def noted(turn: BodyTurn) -> None:
        turns.append(turn)
        check_later(turn)

    monkeypatch.setattr(BodyTurn, "_check_later", noted)
    monkeypatch.setattr(module, "CHECK_S", 1000)  # the test says when
    bodies = BodyThrottle(links)
    first = [Client(bodies) for _ in range(READERS)]
    for client in first:
        await has_turn(client)
    late = Client(bodies)
    late.pieces.put_nowait(b"late")
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(4):
            for client in first:
                client.pieces.put_nowait(FAST)
            while any(turn._num_bytes < FAST_BYTES for turn in turns):
                await asyncio.sleep(0)
            checked, turns[:] = turns.copy(), []
            for turn in checked:
                turn._check()
            assert turns == checked, "they keep their turns"
    assert not late.has_turn.is_set()
    await first[0].finish()
    await has_turn(late)
    assert await late.finish() == b"late"
    await first[1].finish()


async def test_a_slow_client_loses_its_turn_and_is_read_all_the_same(links: FakeLinks) -> None:
    bodies = BodyThrottle(links)
    slow = [Client(bodies) for _ in range(READERS)]
    for client in slow:
        await has_turn(client)
    late = Client(bodies)
    await has_turn(late)
    for client in slow:
        client.pieces.put_nowait(b"slow")
        assert await client.finish() == b"slow"
    await late.finish()


async def test_a_turn_begins_when_the_tokenizer_has_caught_up(links: FakeLinks) -> None:
    links.num_bytes = MAX_BACKLOG_BYTES + 1
    client = Client(BodyThrottle(links))
    async with asyncio.timeout(DEADLINE_S):
        while links.looks < 3:
            await asyncio.sleep(0)
    assert not client.has_turn.is_set()
    links.num_bytes = 0
    await has_turn(client)
    await client.finish()


async def test_long_body_waits_for_no_huge_one(links: FakeLinks) -> None:
    bodies = BodyThrottle(links)
    links.num_bytes = MAX_BACKLOG_BYTES + 1
    huge = [Client(bodies) for _ in range(READERS + 1)]
    long = Client(bodies, LONG_BODY_BYTES)
    await has_turn(long)
    assert not any(client.has_turn.is_set() for client in huge)
    await long.finish()
    links.num_bytes = 0
    for client in huge:
        await has_turn(client)
        await client.finish()


async def test_disconnected_waiter_takes_no_turn(links: FakeLinks) -> None:
    bodies = BodyThrottle(links)
    links.num_bytes = MAX_BACKLOG_BYTES + 1
    waiting: list[Any] = [Client(bodies) for _ in range(READERS + 1)]
    async with asyncio.timeout(DEADLINE_S):
        while links.looks < READERS:
            await asyncio.sleep(0)
    for client in waiting:
        client.task.cancel()
    await asyncio.gather(*(client.task for client in waiting), return_exceptions=True)
    links.num_bytes = 0
    after = [Client(bodies) for _ in range(READERS)]
    for client in after:
        await has_turn(client)
        await client.finish()
