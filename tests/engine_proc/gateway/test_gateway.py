"""The gateway of an engine, and a server that is played."""

import time
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from servers import wait_until

from headrace.board.board import Board, Seat, State
from headrace.board.fields import EngineField
from headrace.config.process_configs import GatewayConfig
from headrace.engine_proc.gateway import gateway as gateway_module
from headrace.engine_proc.gateway.gateway import Gateway
from headrace.ipc.curve_key import make_key, read_key
from headrace.ipc.curve_links import CurveLink
from headrace.ipc.messages import (
    Abort,
    GenerateRequest,
    Message,
    Sampling,
    StepOutput,
    Times,
    request_id,
)
from headrace.ipc.prefix_index import PrefixIndex, create_prefix_index
from headrace.ipc.remote_messages import (
    NO_SESSION,
    CachedPages,
    FromGateway,
    Grant,
    Member,
    Outputs,
    SessionState,
    SessionStatus,
)
from headrace.ipc.sockets import Frame

SESSION, ENGINE, AHEAD_NS = 5, 3, 1_000
REQUEST = request_id(0, 1)
DEADLINE_MS = 60_000


class Rig:
    """A gateway whose engine is idle, and its server."""

    def __init__(self, folder: Path) -> None:
        key_file = str(folder / "key")
        make_key(key_file)
        roles = ("frontend", "tokenizer", "engine", "detokenizer")
        self.board = Board.create([Seat(role, 0) for role in roles])
        self.engine = self.board.slot("engine")
        self.engine.enter(State.READY)
        config = GatewayConfig(
            listen="tcp://127.0.0.1:*",
            key_file=key_file,
            terms={"model": "m"},
            prefix_fds=(create_prefix_index(), create_prefix_index()),
        )
        self.indexes = [PrefixIndex(fd) for fd in config.prefix_fds]
        self.pages: set[tuple[int, bytes]] = set()  # by index, that have come
        context: Any = SimpleNamespace(slot=self.engine, board=self.board, tee=None)
        self.gateway = Gateway(config, context)
        self.outbox = self.gateway.outbox(0)
        self.make_link = partial(CurveLink, self.gateway._listener.where, read_key(key_file))
        self.server, self.detokenizer = self.make_link(), self.make_link()
        self._decoder: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)
        self.outputs: list[list[Frame]] = []
        self.state: SessionState | None = None

    def grant(self, session: int = SESSION) -> None:
        """Grant the engine time."""
        now = time.monotonic_ns()
        self.send(Grant(session, now, AHEAD_NS, ENGINE, [1], {"model": "m"}))

    def send(self, message: Message, frame: bytes | None = None) -> None:
        """Send a message of the server's seat."""
        frames: list[Frame] = [msgspec.msgpack.encode(message), *([] if frame is None else [frame])]
        self.send_by(self.server, frames)

    def send_by(self, link: CurveLink, frames: list[Frame]) -> None:
        """Send a message, once there is a connection."""

        def is_sent() -> bool:
            self.gateway._listener.admit()
            return link.send(frames)

        wait_until(is_sent, "there is a connection")

    def read(self) -> None:
        """Take what has come to the server."""
        while (frames := self.server.receive()) is not None:
            match message := self._decoder.decode(frames[0]):
                case SessionStatus():
                    self.state = message.state
                case Outputs():
                    self.outputs.append(frames[1:])
                case CachedPages(index=index):
                    words = memoryview(frames[1]).cast("B")
                    self.pages |= {
                        (index, bytes(words[i : i + 8])) for i in range(0, len(words), 8)
                    }

    def has(self, state: SessionState) -> bool:
        """Whether the session is in a state; the engine waits for messages meanwhile."""
        assert self.gateway.receive(1) is None
        self.read()
        return self.state == state

    def begin(self) -> None:
        """Begin a session."""
        self.grant()
        wait_until(lambda: self.has(SessionState.SERVING), "the session has begun")

    def generate(self, session: int | None = None) -> None:
        """Send a request with a prompt of two tokens, and have the engine take it.

        Args:
            session: it comes from a detokenizer, which gets the steps.
        """
        request = GenerateRequest(REQUEST, 0, 4, Sampling(), [], b"")
        pair: list[Frame] = [msgspec.msgpack.encode(request), array("I", [7, 8]).tobytes()]
        if session is None:
            self.send_by(self.server, pair)
        else:
            member = msgspec.msgpack.encode(Member(session, 0))
            self.send_by(self.detokenizer, [member, *pair])
        received = self.gateway.receive(DEADLINE_MS)
        assert received is not None
        assert received[0] == request
        assert list(memoryview(received[1]).cast("B").cast("I")) == [7, 8]
        self.engine.add(EngineField.TAKEN_TOKENS, 2)

    def send_step(self) -> None:
        """Have the engine send a step."""
        times = {REQUEST: Times(1, queued=2)}
        step = StepOutput.of({}, [REQUEST], [1], [None], times=times)
        self.outbox.send_all([(step, array("I", [9]).tobytes())])

    def close(self) -> None:
        self.detokenizer.close()
        self.server.close()
        self.gateway.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_steps_come_as_those_of_the_server_engine(rig: Rig) -> None:
    rig.begin()
    rig.generate()
    rig.send_step()

    def have_come() -> bool:
        rig.read()
        return bool(rig.outputs)

    wait_until(have_come, "the step has come")
    ((encoded, tokens),) = rig.outputs
    step = msgspec.msgpack.decode(encoded, type=StepOutput)
    assert step.engine == ENGINE
    assert step.times == {REQUEST: Times(1, queued=2 + AHEAD_NS)}
    assert bytes(tokens) == array("I", [9]).tobytes()


def test_grants_are_answered_while_the_engine_is_at_a_step(rig: Rig) -> None:
    rig.begin()
    rig.state = None
    rig.gateway.start()
    rig.grant()

    def is_answered() -> bool:
        rig.read()
        return rig.state == SessionState.SERVING

    wait_until(is_answered, "the grant is answered")


def test_an_engine_without_a_grant_sends_nothing(rig: Rig) -> None:
    rig.begin()
    rig.generate()
    session = rig.gateway._session
    assert session is not None
    session._until = 0
    rig.send_step()
    received = rig.gateway.receive(DEADLINE_MS)
    assert received is not None
    assert received[0] == Abort(REQUEST)
    wait_until(lambda: rig.has(SessionState.LOST), "the server is told")
    assert not rig.outputs


def test_an_engine_sends_by_a_grant_that_it_has_not_read(rig: Rig) -> None:
    rig.begin()
    rig.generate()
    session, messages = rig.gateway._session, rig.gateway._listener._messages
    assert session is not None
    session._until = 0  # as where the engine had no processor for long
    rig.grant()
    wait_until(lambda: bool(zmq.zmq_poll(messages, 0)), "the grant is there")
    rig.send_step()

    def has_come() -> bool:
        rig.read()
        return bool(rig.outputs)

    wait_until(has_come, "the step has come")
    assert rig.gateway._session is session


def test_pages_of_the_engine_and_of_its_store_are_told(rig: Rig) -> None:
    digests = [b"a" * 16, b"b" * 16]
    for index, digest in zip(rig.indexes, digests, strict=True):
        index.add(digest)
    expected = {(0, digests[0][:8]), (1, digests[1][:8])}
    rig.grant()
    wait_until(lambda: rig.has(SessionState.SERVING) and rig.pages == expected, "pages have come")


def test_a_session_begins_when_the_engine_is_idle(rig: Rig) -> None:
    rig.engine[EngineField.IS_BUSY] = 1
    rig.grant()
    wait_until(lambda: rig.has(SessionState.WAITING), "the server is told")
    rig.engine[EngineField.IS_BUSY] = 0
    rig.grant()
    wait_until(lambda: rig.has(SessionState.SERVING), "the session has begun")


def test_steps_come_to_a_detokenizer_that_is_a_member(rig: Rig) -> None:
    rig.begin()
    rig.generate(SESSION)
    rig.send_step()
    frames = list[Frame]()

    def have_come() -> bool:
        frames.extend(rig.detokenizer.receive() or ())
        return bool(frames)

    wait_until(have_come, "the step has come")
    assert msgspec.msgpack.decode(frames[0], type=Outputs) == Outputs(SESSION, 0)
    assert bytes(frames[2]) == array("I", [9]).tobytes()
    rig.read()
    assert not rig.outputs


def test_a_session_ends_when_a_detokenizer_has_left(rig: Rig) -> None:
    """Steps that were on their way are lost, so the next one may not come by the seat."""
    rig.begin()
    rig.generate(SESSION)
    rig.send_step()
    rig.detokenizer.close()
    rig.detokenizer = rig.make_link()  # another process, or the same once more

    def has_ended() -> bool:
        rig.send_step()
        rig.read()
        return rig.state == SessionState.LOST

    wait_until(has_ended, "the session ends")
    assert not rig.outputs
    received = rig.gateway.receive(DEADLINE_MS)
    assert received is not None
    assert received[0] == Abort(REQUEST)


def test_requests_of_members_of_another_session_are_dropped(rig: Rig) -> None:
    rig.begin()
    request = GenerateRequest(REQUEST + 256, 0, 4, Sampling(), [], b"")
    member = msgspec.msgpack.encode(Member(SESSION + 1, 0))
    rig.send_by(rig.detokenizer, [member, msgspec.msgpack.encode(request), b""])
    rig.generate(SESSION)


@pytest.mark.parametrize(("session", "answered"), [(SESSION, SESSION), (SESSION + 1, NO_SESSION)])
def test_a_member_is_told_whether_its_session_is_here(
    rig: Rig, session: int, answered: int
) -> None:
    rig.begin()
    rig.send_by(rig.detokenizer, [msgspec.msgpack.encode(Member(session, 0))])
    frames = list[Frame]()

    def is_answered() -> bool:
        assert rig.gateway.receive(1) is None
        frames.extend(rig.detokenizer.receive() or ())
        return bool(frames)

    wait_until(is_answered, "the answer comes")
    assert frames == [msgspec.msgpack.encode(Member(answered, 0))]


def test_a_session_ends_when_too_much_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "MAX_UNREAD_BYTES", 4096)
    rig.begin()
    backlog = rig.gateway._backlog
    for id in range(REQUEST, REQUEST + 9):
        request = GenerateRequest(id, 0, 4, Sampling(), [], b"")
        rig.send(request, bytes(512))

    def has_ended() -> bool:
        rig.gateway._take_all()  # as where the engine is at a long step
        rig.read()
        return rig.state == SessionState.LOST

    wait_until(has_ended, "the session ends")
    received = rig.gateway.receive(0)
    assert received is not None
    assert received[0] == Abort(REQUEST)
    assert backlog() == 0


def test_a_record_has_the_requests_of_members(rig: Rig) -> None:
    """The replay of an engine that listens plays these."""
    frames = list[Frame]()
    rig.gateway._tee = SimpleNamespace(take=frames.extend)  # type: ignore[assignment]
    rig.begin()
    rig.generate(SESSION)
    assert len(frames) == 2
    assert msgspec.msgpack.decode(frames[0], type=GenerateRequest).id == REQUEST
