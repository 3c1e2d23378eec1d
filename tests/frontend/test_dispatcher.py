"""Entries reach their requests in order, with the event loop free in between."""

import asyncio

import pytest

from headrace.board.board import SLOT_WORDS, Seat, Slot
from headrace.board.fields import FrontendField
from headrace.exit_status import ExitStatus
from headrace.frontend.dispatcher import Dispatcher
from headrace.frontend.http.socket_writer import TURN
from headrace.frontend.open_requests import OpenRequests
from headrace.ipc.inflight import InflightRequest
from headrace.ipc.messages import MORE, Head, HttpRequest, ResponseFrames

HEAD = Head(200, "text/plain")


async def test_a_large_message_is_delivered_in_turns() -> None:
    slot = Slot(memoryview(bytearray(SLOT_WORDS * 8)).cast("Q"), Seat("frontend", 0))
    open_requests = OpenRequests(0, slot)
    dispatcher = Dispatcher(asyncio.get_running_loop(), open_requests, slot)
    waiting = [open_requests.open() for _ in range(2 * TURN + 1)]
    ids = [open_request.id for open_request in waiting]
    first = ResponseFrames.of(dict.fromkeys(ids, HEAD), ids, [1] * len(ids), [False] * len(ids))
    dispatcher.take(first, b"a" * len(ids))
    dispatcher.take(ResponseFrames.of({}, ids[:1], [1], [True]), b"b")
    has_come = [bool(open_request.unsent) for open_request in waiting]
    assert sum(has_come) == TURN
    assert slot[FrontendField.MESSAGES_TAKEN] == 0
    assert bytes(waiting[0].unsent) == b"a", "what came later is later"
    turns = 0
    while slot[FrontendField.MESSAGES_TAKEN] < 2:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 3
    assert bytes(waiting[0].unsent) == b"ab"
    assert all(open_request.unsent and open_request.head == HEAD for open_request in waiting)


async def test_a_message_of_just_one_turn_ends() -> None:
    slot = Slot(memoryview(bytearray(SLOT_WORDS * 8)).cast("Q"), Seat("frontend", 0))
    open_requests = OpenRequests(0, slot)
    dispatcher = Dispatcher(asyncio.get_running_loop(), open_requests, slot)
    ids = [open_requests.open().id for _ in range(TURN)]
    dispatcher.take(ResponseFrames.of({}, ids, [1] * len(ids), [True] * len(ids)), b"a" * len(ids))
    while not slot[FrontendField.MESSAGES_TAKEN]:
        await asyncio.sleep(0)
    assert all(open_request.complete for open_request in open_requests)


async def test_slices_of_a_body_complete_a_request_with_the_last() -> None:
    slot = Slot(memoryview(bytearray(SLOT_WORDS * 8)).cast("Q"), Seat("frontend", 0))
    exchanges = OpenRequests(0, slot)
    delivery = Dispatcher(asyncio.get_running_loop(), exchanges, slot)
    exchange = exchanges.open()
    exchange.sent = InflightRequest(HttpRequest(exchange.id, "POST", "/", 0.0), b"")
    delivery.take(ResponseFrames.of({}, [exchange.id], [2], [MORE]), b"ab")
    assert (exchange.complete, bytes(exchange.unsent)) == (False, b"")
    assert exchanges.incomplete() == [exchange.sent], "it is sent again if the detokenizer dies"
    delivery.take(ResponseFrames.of({exchange.id: HEAD}, [exchange.id], [1], [True]), b"c")
    assert (exchange.complete, bytes(exchange.unsent), exchange.head) == (True, b"abc", HEAD)


async def test_a_message_that_cannot_be_handed_over_ends_the_process() -> None:
    slot = Slot(memoryview(bytearray(SLOT_WORDS * 8)).cast("Q"), Seat("frontend", 0))
    open_requests = OpenRequests(0, slot)
    dispatcher = Dispatcher(asyncio.get_running_loop(), open_requests, slot)
    open_request = open_requests.open()

    def fail() -> None:
        raise LookupError("not foreseen")

    open_request.on_news = fail
    wrong = ResponseFrames.of({}, [open_request.id], [2], [True])
    unforeseen = ResponseFrames.of({}, [open_request.id], [1], [True])
    # pytest rewrites the assertions of a package that has a plugin: a text may follow.
    for frames, words in ((wrong, "AssertionError("), (unforeseen, "LookupError('not foreseen')")):
        with pytest.raises(SystemExit) as end:
            dispatcher.take(frames, b"a")
        assert end.value.code == ExitStatus.FAILED
        assert slot.exit_reason.startswith(words)
