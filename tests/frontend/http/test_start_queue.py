"""Requests begin in the order of their coming, with the event loop free in between."""

import asyncio
from functools import partial

from headrace.frontend.http.start_queue import MAX_BEGUN, StartQueue

DEADLINE_S = 120


async def test_many_requests_begin_in_turns() -> None:
    ends: list[int] = []
    begun: list[int] = []
    start_queue = StartQueue(after=lambda: ends.append(len(begun)))
    for number in range(2 * MAX_BEGUN + 1):
        start_queue.add(partial(begun.append, number))
    assert not begun
    sizes = []
    while len(begun) <= 2 * MAX_BEGUN:
        await asyncio.sleep(0)
        sizes.append(len(begun))
    assert sizes == [MAX_BEGUN, 2 * MAX_BEGUN, 2 * MAX_BEGUN + 1]
    assert begun == list(range(2 * MAX_BEGUN + 1))
    assert ends == sizes, "what is done for all is done once in a turn"


async def test_first_request_begins_before_all_that_wait() -> None:
    start_queue = StartQueue()
    begun: list[int] = []
    for number in range(MAX_BEGUN + 1):
        start_queue.add(partial(begun.append, number))
    start_queue.add(partial(begun.append, -1), is_first=True)
    while not begun:
        await asyncio.sleep(0)
    assert begun == [-1, *range(MAX_BEGUN - 1)]


async def test_those_behind_one_that_fails_begin() -> None:
    failures: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, failed: failures.append(failed["exception"]))
    begun: list[int] = []
    sent: list[int] = []
    start_queue = StartQueue(after=lambda: sent.extend(begun))
    error = ValueError("unexpected")

    def fail() -> None:
        raise error

    start_queue.add(partial(begun.append, 1))
    start_queue.add(fail)
    start_queue.add(partial(begun.append, 2))
    async with asyncio.timeout(DEADLINE_S):
        while len(begun) < 2:
            await asyncio.sleep(0)
    assert sent == [1, 1, 2], "and what is done once in a turn is done"
    assert failures == [error]


async def test_a_request_that_comes_while_others_begin_is_the_last() -> None:
    start_queue = StartQueue()
    begun: list[str] = []

    def begin() -> None:
        begun.append("first")
        start_queue.add(partial(begun.append, "last"))

    start_queue.add(begin)
    start_queue.add(partial(begun.append, "second"))
    while len(begun) < 3:
        await asyncio.sleep(0)
    assert begun == ["first", "second", "last"]
