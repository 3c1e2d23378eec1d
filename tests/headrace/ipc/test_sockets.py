"""Messages and their bulk cross a link; a full one refuses instead of waiting."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.ipc.messages import (
    Abort,
    HttpRequest,
    ResponseFrames,
    StopSequence,
    ToEngine,
    ToTokenizer,
)
from headrace.ipc.sockets import Frame, Inbox, Outbox, address

DEADLINE_MS = 120_000
REQUEST = HttpRequest(7, "POST", "/v1/completions", 1.5)


@pytest.fixture
def where(tmp_path: Path) -> str:
    return address(str(tmp_path), "tokenizer", 3)


@pytest.fixture
def inbox(where: str) -> Iterator[Inbox[ToTokenizer]]:
    made: Inbox[ToTokenizer] = Inbox(where, ToTokenizer)
    yield made
    made.close()


@pytest.fixture
def outbox(where: str) -> Iterator[Outbox]:
    made = Outbox(where)
    yield made
    made.close()


def test_addresses_are_files_of_the_run_directory() -> None:
    assert address("/run/x", "tokenizer", 3) == "ipc:///run/x/tokenizer-3.sock"
    assert address("/run/x", "engine") == "ipc:///run/x/engine-0.sock"


@pytest.mark.parametrize("body", [b"", b"{}", b"\x00\xff" * 500000])
def test_message_and_bulk_arrive_as_sent(
    body: bytes, inbox: Inbox[ToTokenizer], outbox: Outbox
) -> None:
    outbox.send(REQUEST, body)
    received = inbox.receive(DEADLINE_MS)
    assert received is not None
    assert (received[0], bytes(received[1])) == (REQUEST, body)


def test_a_message_without_bulk_has_an_empty_one(inbox: Inbox[ToTokenizer], outbox: Outbox) -> None:
    outbox.send(REQUEST)
    assert inbox.receive(DEADLINE_MS) == (REQUEST, b"")


def test_messages_sent_as_one_arrive_one_by_one(inbox: Inbox[ToTokenizer], outbox: Outbox) -> None:
    others = [HttpRequest(id, "POST", "/", 0.0) for id in range(3)]
    bulks: list[Frame] = [b"a", b"", b"c" * 100_000]
    outbox.send_all(list(zip(others, bulks, strict=True)))
    outbox.send_all([])
    outbox.send(REQUEST)
    for other, bulk in zip(others, bulks, strict=True):
        assert inbox.wait(DEADLINE_MS)
        received = inbox.receive(0)
        assert received is not None
        assert (received[0], bytes(received[1])) == (other, bytes(bulk))
    assert inbox.receive(DEADLINE_MS) == (REQUEST, b"")


def test_bulk_may_be_a_view(inbox: Inbox[ToTokenizer], outbox: Outbox) -> None:
    outbox.send(REQUEST, memoryview(b"0123456789")[2:5])
    received = inbox.receive(DEADLINE_MS)
    assert received is not None
    assert bytes(received[1]) == b"234"


def test_the_sender_may_change_its_buffer_once_it_has_sent(
    inbox: Inbox[ToTokenizer], outbox: Outbox
) -> None:
    buffer = bytearray(b"x" * 200000)
    outbox.send(REQUEST, memoryview(buffer))
    buffer[:] = b"y" * 200000
    received = inbox.receive(DEADLINE_MS)
    assert received is not None
    assert bytes(received[1]) == b"x" * 200000


def test_messages_of_one_sender_keep_their_order(inbox: Inbox[ToTokenizer], outbox: Outbox) -> None:
    sent = [HttpRequest(i, "GET", "/", 0.0) for i in range(300)]
    for message in sent:
        outbox.send(message)
    received = [inbox.receive(DEADLINE_MS) for _ in sent]
    assert [r and r[0] for r in received] == sent


def test_many_senders_share_an_inbox(tmp_path: Path) -> None:
    where = address(str(tmp_path), "engine")
    inbox: Inbox[ToEngine] = Inbox(where, ToEngine)
    outboxes = [Outbox(where) for _ in range(3)]
    outboxes[0].send(Abort(1))
    outboxes[1].send(StopSequence(2))
    outboxes[2].send(Abort(3))
    received = [inbox.receive(DEADLINE_MS) for _ in outboxes]
    assert {r[0] for r in received if r} == {Abort(1), StopSequence(2), Abort(3)}
    inbox.close()
    for outbox in outboxes:
        outbox.close()


def test_messages_sent_before_the_receiver_listens_arrive(where: str, outbox: Outbox) -> None:
    outbox.send(REQUEST, b"early")
    inbox: Inbox[ToTokenizer] = Inbox(where, ToTokenizer)
    received = inbox.receive(DEADLINE_MS)
    inbox.close()
    assert received is not None
    assert bytes(received[1]) == b"early"


@pytest.mark.parametrize("timeout_ms", [0, 20])
def test_nothing_is_none(timeout_ms: int, inbox: Inbox[ToTokenizer]) -> None:
    assert inbox.receive(timeout_ms) is None


def test_a_full_link_refuses_without_waiting(where: str) -> None:
    outbox = Outbox(where, high_water=4)  # without a receiver
    accepted = [outbox.try_send(REQUEST, b"x") for _ in range(10)]
    outbox.close()
    assert accepted == [True] * 4 + [False] * 6


def test_what_is_put_arrives_once_it_is_flushed(inbox: Inbox[ToTokenizer], outbox: Outbox) -> None:
    others = [HttpRequest(id, "POST", "/", 0.0) for id in range(3)]
    bulks: list[Frame] = [b"a", b"c" * 100_000, b""]
    assert all([outbox.try_put(*pair) for pair in zip(others, bulks, strict=True)])
    assert not inbox.wait(20)
    outbox.flush()
    outbox.flush()
    outbox.send(REQUEST, b"x")
    received = [inbox.receive(DEADLINE_MS) for _ in range(4)]
    sent = [*zip(others, bulks, strict=True), (REQUEST, b"x")]
    assert [pair and (pair[0], bytes(pair[1])) for pair in received] == sent


def test_a_full_link_refuses_what_is_put(where: str) -> None:
    outbox = Outbox(where, high_water=4)  # without a receiver
    accepted = []
    for _ in range(5):
        accepted += [outbox.try_put(REQUEST, b"x") for _ in range(2)]
        outbox.flush()
    outbox.close()
    assert accepted == [True] * 8 + [False] * 2, "what goes together is one message"


async def test_an_attached_inbox_calls_for_every_message(
    inbox: Inbox[ToTokenizer], outbox: Outbox
) -> None:
    received: list[tuple[int, bytes]] = []
    all_here = asyncio.Event()

    def handle(message: ToTokenizer, bulk: Frame) -> None:
        received.append((message.id, bytes(bulk)))
        if len(received) == 200:
            all_here.set()

    outbox.send(HttpRequest(0, "GET", "/", 0.0), b"0")  # before it is attached
    loop = asyncio.get_running_loop()
    inbox.attach(loop, handle)
    for i in range(1, 200):
        outbox.send(HttpRequest(i, "GET", "/", 0.0), str(i).encode())
        if i % 10 == 0:
            await asyncio.sleep(0)  # let the loop read some in between
    await asyncio.wait_for(all_here.wait(), DEADLINE_MS / 1000)
    assert received == [(i, str(i).encode()) for i in range(200)]


def test_a_message_for_another_receiver_is_not_mistaken(
    inbox: Inbox[ToTokenizer], outbox: Outbox
) -> None:
    outbox.send(ResponseFrames.of({}, [], [], []))
    with pytest.raises(ValueError, match="Invalid value"):
        inbox.receive(DEADLINE_MS)
