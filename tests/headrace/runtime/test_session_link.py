"""Links that last as long as the session of a remote engine."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zmq
from servers import wait_until

from headrace.board.board import Board, Seat
from headrace.board.fields import EngineField
from headrace.config.process_configs import RemoteEngine
from headrace.ipc import curve_links
from headrace.ipc.curve_key import make_key, read_key
from headrace.ipc.curve_links import CurveListener
from headrace.ipc.messages import GenerateRequest, Sampling, request_id
from headrace.ipc.remote_messages import NO_SESSION, Member
from headrace.ipc.sockets import STEP_HIGH_WATER
from headrace.runtime.session_link import SessionLink

SESSION, DETOKENIZER = 5, 2
READ_MS = 20  # of a slow reader, for each message
REQUEST = GenerateRequest(request_id(0, 1), 0, 4, Sampling(), [], b"")


class Rig:
    """A link, and the gateway that it is to."""

    def __init__(self, folder: Path) -> None:
        key_file = str(folder / "key")
        make_key(key_file)
        self.make_gateway = partial(CurveListener, "tcp://127.0.0.1:*", read_key(key_file), "")
        self.gateway = self.make_gateway()
        self.slot = Board.create([Seat("engine", 0)]).slot("engine")
        remote = RemoteEngine(address=self.gateway.where, key_file=key_file, terms={})
        self.link = SessionLink(str(folder), remote, self.slot, DETOKENIZER)
        self.peer = b""
        self.answered = self.answer = msgspec.msgpack.encode(Member(SESSION, DETOKENIZER))
        self.received = list[list[bytes]]()

    def follow(self) -> bool:
        """Let both ends work; return whether the link is open."""
        self.gateway.admit()
        while (received := self.gateway.receive()) is not None:
            self.peer = received[0]
            self.received.append([bytes(frame) for frame in received[1]])
            if received[1] == [self.answered]:
                assert self.gateway.send(self.peer, [self.answer])
        return self.link.follow()

    def open(self, session: int) -> None:
        """Begin a session."""
        self.slot[EngineField.SESSION] = session
        wait_until(self.follow, "the link is open")

    def close(self) -> None:
        self.link.close()
        self.gateway.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_messages_name_the_session_on_the_board(rig: Rig) -> None:
    assert not rig.link.send([(REQUEST, b"")]), "there is no session"
    assert not rig.link.polled
    rig.open(SESSION)
    assert rig.link.send([(REQUEST, b"1234")])

    def have_come() -> bool:
        return rig.follow() and len(rig.received) == 2

    wait_until(have_come, "both messages have come")
    head = msgspec.msgpack.encode(Member(SESSION, DETOKENIZER))
    assert rig.received == [[head], [head, msgspec.msgpack.encode(REQUEST), b"1234"]]


def test_a_link_ends_with_its_session(rig: Rig) -> None:
    rig.open(SESSION)
    rig.slot[EngineField.SESSION] = 0
    assert not rig.link.follow()
    assert not rig.link.polled
    rig.answered = rig.answer = msgspec.msgpack.encode(Member(SESSION + 1, DETOKENIZER))
    rig.open(SESSION + 1)
    assert rig.slot[EngineField.LOST_SESSION] == 0, "nothing was lost"


@pytest.mark.parametrize("is_open", [True, False])
def test_a_session_ends_with_a_link_that_breaks(rig: Rig, is_open: bool) -> None:
    """Steps may be behind an answer that has not come."""
    if is_open:
        rig.open(SESSION)
    else:
        rig.answered, rig.slot[EngineField.SESSION] = b"", SESSION
        wait_until(lambda: rig.follow() or bool(rig.received), "it has asked")
    rig.gateway.close()
    rig.gateway = rig.make_gateway()
    wait_until(lambda: not (rig.link.follow() or rig.link.polled), "the loss is seen")
    assert rig.slot[EngineField.LOST_SESSION] == SESSION
    assert not rig.link.polled, "it does not connect again"


def test_a_link_opens_when_the_gateway_answers(rig: Rig) -> None:
    rig.answered = b""
    rig.slot[EngineField.SESSION] = SESSION
    wait_until(lambda: rig.follow() or bool(rig.received), "it has asked")
    assert not rig.link.send([(REQUEST, b"")])
    assert rig.gateway.send(rig.peer, [rig.answer])
    wait_until(rig.follow, "the link is open")
    assert len(rig.received) == 1, "it asks once"


def test_a_link_to_another_engine_stays_closed(rig: Rig) -> None:
    """Several machines may have one name, and the seat's session be with another of them."""
    rig.answer = msgspec.msgpack.encode(Member(NO_SESSION, DETOKENIZER))
    rig.slot[EngineField.SESSION] = SESSION
    wait_until(lambda: bool(rig.follow() or rig.link.polled), "it connects")
    wait_until(lambda: rig.follow() or not rig.link.polled, "it is refused")
    assert not rig.link.send([(REQUEST, b"")])
    assert rig.slot[EngineField.LOST_SESSION] == 0, "nothing was lost"


def test_a_slow_reader_keeps_its_link(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_links, "SILENCE_MS", 1000)
    rig.open(SESSION)
    num_read, until = 0, time.monotonic() + 2
    while time.monotonic() < until:
        while rig.gateway.send(rig.peer, [bytes(1 << 14)]):  # as much as there is room for
            pass
        num_read += rig.link.receive() is not None
        assert rig.follow()
        _, changes = rig.link.polled
        zmq.zmq_poll([changes], READ_MS)  # a loss is known at once
    assert num_read > STEP_HIGH_WATER


def test_without_a_key_there_is_no_link_and_no_loss(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "key").unlink()
    rig.slot[EngineField.SESSION] = SESSION
    assert not rig.link.follow()
    assert rig.slot[EngineField.LOST_SESSION] == 0
