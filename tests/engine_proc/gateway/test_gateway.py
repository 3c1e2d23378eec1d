"""The gateway of an engine, and a server that is played."""

import time
from array import array
from collections.abc import Iterator
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
from headrace.ipc.prefix_index import create_prefix_index
from headrace.ipc.remote_messages import FromGateway, Grant, Outputs, SessionState, SessionStatus
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
            prefix_fd=create_prefix_index(),
        )
        context: Any = SimpleNamespace(slot=self.engine, board=self.board, tee=None)
        self.gateway = Gateway(config, context)
        self.outbox = self.gateway.outbox(0)
        self.server = CurveLink(self.gateway._listener.where, read_key(key_file))
        self._decoder: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)
        self.outputs: list[list[Frame]] = []
        self.state: SessionState | None = None

    def grant(self, session: int = SESSION) -> None:
        """Grant the engine time."""
        now = time.monotonic_ns()
        self.send(Grant(session, now, AHEAD_NS, ENGINE, [1], {"model": "m"}))

    def send(self, message: Message, frame: bytes | None = None) -> None:
        """Send a message of the server, once there is a connection."""
        frames: list[Frame] = [msgspec.msgpack.encode(message), *([] if frame is None else [frame])]

        def is_sent() -> bool:
            self.gateway._listener.admit()
            return self.server.send(frames)

        wait_until(is_sent, "there is a connection")

    def read(self) -> None:
        """Take what has come to the server."""
        while (frames := self.server.receive()) is not None:
            match message := self._decoder.decode(frames[0]):
                case SessionStatus():
                    self.state = message.state
                case Outputs():
                    self.outputs.append(frames[1:])
                case _:
                    pass

    def has(self, state: SessionState) -> bool:
        """Whether the session is in a state; the engine waits for messages meanwhile."""
        assert self.gateway.receive(1) is None
        self.read()
        return self.state == state

    def begin(self) -> None:
        """Begin a session."""
        self.grant()
        wait_until(lambda: self.has(SessionState.SERVING), "the session has begun")

    def generate(self) -> None:
        """Send a request with a prompt of two tokens, and have the engine take it."""
        request = GenerateRequest(REQUEST, 0, 4, Sampling(), [], b"")
        self.send(request, array("I", [7, 8]).tobytes())
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


def test_a_session_begins_when_the_engine_is_idle(rig: Rig) -> None:
    rig.engine[EngineField.IS_BUSY] = 1
    rig.grant()
    wait_until(lambda: rig.has(SessionState.WAITING), "the server is told")
    rig.engine[EngineField.IS_BUSY] = 0
    rig.grant()
    wait_until(lambda: rig.has(SessionState.SERVING), "the session has begun")
