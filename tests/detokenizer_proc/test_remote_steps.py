"""Steps of engines on other machines, as a detokenizer gets them."""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from servers import wait_until

from headrace.board.board import Board, Seat
from headrace.board.fields import EngineField
from headrace.config.process_configs import DetokenizerConfig, RemoteEngine
from headrace.detokenizer_proc.remote_steps import RemoteSteps
from headrace.ipc.curve_key import make_key, read_key
from headrace.ipc.curve_links import CurveListener
from headrace.ipc.messages import StepOutput, request_id
from headrace.ipc.remote_messages import Outputs
from headrace.ipc.sockets import Frame

SESSION, ENGINE, VOCAB_SIZE = 5, 1, 9


class Rig:
    """A detokenizer's links to an engine on another machine, and that engine's gateway."""

    def __init__(self, folder: Path) -> None:
        key_file = str(folder / "key")
        make_key(key_file)
        self.gateway = CurveListener("tcp://127.0.0.1:*", read_key(key_file), "")
        seats = [Seat("engine", 0), Seat("engine", ENGINE), Seat("detokenizer", 0)]
        board = Board.create(seats)
        self.slot = board.slot("engine", ENGINE)
        remote = RemoteEngine(address=self.gateway.where, key_file=key_file, terms={})
        config = DetokenizerConfig(
            run_dir=str(folder),
            tokenizer_paths=(),
            num_frontends=1,
            stream_interval=1,
            remote_engines={ENGINE: remote},
            vocab_size=VOCAB_SIZE,
        )
        self.steps = RemoteSteps(config, board, 0)
        self._peer = b""
        self.slot[EngineField.SESSION] = SESSION
        wait_until(self._is_known, "the gateway knows the detokenizer")

    def _is_known(self) -> bool:
        self.gateway.admit()
        self.steps.follow()
        received = self.gateway.receive()
        if received is not None:
            self._peer, frames = received
            assert self.gateway.send(self._peer, frames), "it has the session"
        return bool(self._peer)

    def receive(self) -> tuple[StepOutput, Frame] | None:
        """Return the next step with its frame, if it has come."""
        self.steps.follow()
        return self.steps.receive()

    def send_step(self, *tokens: int, session: int = SESSION, num: int = 1) -> None:
        """Send a step with tokens of a sequence, or `num` of them as one message."""
        step = StepOutput.of({}, [request_id(0, 1)], [len(tokens)], [None])
        step = msgspec.structs.replace(step, engine=ENGINE)
        head, encoded = map(msgspec.msgpack.encode, (Outputs(session, 0), step))
        frames: list[Frame] = [encoded, array("I", tokens).tobytes()]
        assert self.gateway.send(self._peer, [head, *num * frames])

    def close(self) -> None:
        self.steps.close()
        self.gateway.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_steps_of_the_session_come_and_others_do_not(rig: Rig) -> None:
    rig.send_step(1, session=SESSION + 1)
    rig.send_step(2)
    received = list[Any]()

    def has_come() -> bool:
        received.append(rig.receive())
        return received[-1] is not None

    wait_until(has_come, "a step comes")
    step, tokens = received[-1]
    assert step.engine == ENGINE
    assert list(memoryview(tokens).cast("B").cast("I")) == [2]


def test_steps_of_a_session_that_has_ended_are_dropped(rig: Rig) -> None:
    rig.send_step(1, num=2)
    wait_until(lambda: rig.receive() is not None, "the first one comes")
    rig.slot[EngineField.SESSION] = 0
    assert rig.receive() is None


def test_a_token_beyond_the_vocabulary_ends_the_session(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.send_step(VOCAB_SIZE)

    def has_ended() -> bool:
        assert rig.receive() is None
        return rig.slot[EngineField.LOST_SESSION] == SESSION

    wait_until(has_ended, "the session ends")
    assert "engine 1, on another machine, sends what is wrong: token 9 of a vocab" in caplog.text
