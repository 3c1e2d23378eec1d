"""The process in the seat of a remote engine, and a gateway that sends what it should not."""

from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from servers import wait_until

from headrace.board.backlog import engine_backlog
from headrace.board.board import Board, Seat
from headrace.board.fields import EngineField, TokenizerField
from headrace.config.process_configs import RemoteEngine
from headrace.engine_proc.remote import taken_tokens
from headrace.engine_proc.remote.grants import Grants
from headrace.engine_proc.remote.main import RemoteSeat, SessionEnded
from headrace.engine_proc.remote.taken_tokens import TakenTokens
from headrace.engine_proc.request_io.mirrored_words import read_words
from headrace.ipc.curve_key import make_key, read_key
from headrace.ipc.curve_links import CurveListener
from headrace.ipc.messages import RenewLeases, StepOutput, request_id
from headrace.ipc.prefix_index import PLACES, PrefixIndex, create_prefix_index
from headrace.ipc.remote_messages import (
    CachedPages,
    Grant,
    Outputs,
    SessionState,
    SessionStatus,
    ToGateway,
)
from headrace.ipc.sockets import Inbox, Outbox, address

VOCAB_SIZE = 9
DEADLINE_MS = 60_000


class Rig:
    """A seat, and a gateway that always serves.

    Args:
        num_held: tokens of prompts that come before the address of the gateway does.
    """

    def __init__(self, folder: Path, num_held: int = 0) -> None:
        make_key(str(folder / "key"))
        self.gateway = self.make_gateway(folder)
        engines = [Seat("engine", 0), Seat("engine", 1)]
        seats = [Seat("frontend", 0), Seat("tokenizer", 0), *engines]
        self.board = Board.create(seats)
        self.slot = self.board.slot("engine")
        config: Any = SimpleNamespace(
            run_dir=str(folder),
            num_detokenizers=1,
            prefix_fds=(create_prefix_index(), create_prefix_index()),
            execution=SimpleNamespace(vocab_size=VOCAB_SIZE),
        )
        context: Any = SimpleNamespace(slot=self.slot, board=self.board, index=0)
        remote = RemoteEngine(
            address=self.gateway.where, key_file=str(folder / "key"), terms={"model": "m"}
        )
        self.indexes = [PrefixIndex(fd) for fd in config.prefix_fds]
        self.inbox: Inbox[Any] = Inbox(address(str(folder), "engine"), RenewLeases)
        self.outbox = Outbox(address(str(folder), "engine"))
        self.taken = TakenTokens(self.slot, engine_backlog(self.board, 0), 0.0)
        self.board.slot("tokenizer").add(TokenizerField.SENT_TOKENS, num_held)
        self.make_seat = partial(RemoteSeat, config, remote, context=context, taken=self.taken)
        self.seat = self.make_seat(self.gateway.where)
        self._decoder = msgspec.msgpack.Decoder(ToGateway)
        self._peer, self._session = b"", 0

    @staticmethod
    def make_gateway(folder: Path) -> CurveListener:
        """Return the listening end, at a port of its own."""
        return CurveListener("tcp://127.0.0.1:*", read_key(str(folder / "key")), "")

    def work(self) -> None:
        """Answer grants, and let the seat take the answers."""
        self.gateway.admit()
        while (received := self.gateway.receive()) is not None:
            self._peer, frames = received
            message = self._decoder.decode(frames[0])
            if isinstance(message, Grant):
                self._session = message.session
                status = SessionStatus(
                    message.session, message.sent_at, message.sent_at, SessionState.SERVING
                )
                words = read_words(self.slot, 0, with_histograms=False)
                self.send(status, words)
        self.seat.tend()

    def send(self, message: msgspec.Struct, *frames: bytes) -> None:
        """Send a message of the gateway."""
        assert self.gateway.send(self._peer, [msgspec.msgpack.encode(message), *frames])

    def send_step(self, *tokens: int, is_late: bool = False) -> None:
        """Send a step with tokens of a sequence; a late one is of another session."""
        step = StepOutput.of({}, [request_id(0, 1)], [len(tokens)], [None])
        head = Outputs(self._session ^ is_late, 0)
        self.send(head, msgspec.msgpack.encode(step), array("I", tokens).tobytes())

    def close(self) -> None:
        """Close all links."""
        self.seat._link.close()
        self.seat._outboxes[0].close()
        self.outbox.close()
        self.inbox.close()
        self.gateway.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    found = Rig(tmp_path)

    def serves() -> bool:
        found.work()
        return found.seat.serves

    wait_until(serves, "the session has begun")
    yield found
    found.close()


def test_pages_of_the_store_are_apart_from_those_of_the_pool(rig: Rig) -> None:
    digests = [bytes([7 + number]) * 16 for number in range(2)]
    for index, digest in enumerate(digests):
        places = array("I", [int.from_bytes(digest[:8], "little") % PLACES]).tobytes()
        rig.send(CachedPages(rig._session, places, index), digest[:8])

    def found() -> list[int]:
        rig.work()
        return [index.count_cached([d]) for index in rig.indexes for d in digests]

    wait_until(lambda: found() == [1, 0, 0, 1], "each index has its page")


def test_a_token_beyond_the_vocabulary_ends_the_session(rig: Rig) -> None:
    rig.send_step(0, VOCAB_SIZE)

    def tend() -> bool:
        rig.work()
        return False

    with pytest.raises(SessionEnded, match="sends what is wrong: token 9 of a vocabulary of 9"):
        wait_until(tend, "the session ends")


def test_the_session_ends_with_the_link_of_another_process(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.slot[EngineField.SESSION] == rig._session
    rig.seat.tend()
    assert not rig.seat._grants.is_lost
    rig.slot[EngineField.LOST_SESSION] = rig._session
    rig.seat.tend()
    assert rig.seat._grants.is_lost


def test_steps_of_another_session_are_dropped(rig: Rig, tmp_path: Path) -> None:
    inbox: Inbox[StepOutput] = Inbox(address(str(tmp_path), "detokenizer"), StepOutput)
    rig.send_step(1, is_late=True)
    rig.send_step(2)

    def has_come() -> bool:
        rig.work()
        return inbox.wait(0)

    wait_until(has_come, "a step comes")
    received = inbox.receive(0)
    assert received is not None
    assert list(memoryview(received[1]).cast("B").cast("I")) == [2]
    inbox.close()


def test_an_engine_placed_anew_has_a_session_of_its_own(rig: Rig) -> None:
    """An engine is placed anew while its predecessor still ends, and answers."""
    before = rig._session
    rig.seat.close()
    rig.seat = rig.make_seat(rig.gateway.where)

    def serves() -> bool:
        rig.work()
        return rig.seat.serves

    wait_until(serves, "the next session has begun")
    assert rig._session != before


def test_a_gateway_that_has_ended_is_given_up_at_once(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grants, "have_run_out", lambda self, now: False)
    rig.gateway.close()
    rig.gateway = rig.make_gateway(tmp_path)

    def tend() -> bool:
        rig.seat.tend()
        return False

    with pytest.raises(SessionEnded, match=r"nothing listens at tcp://127.0.0.1:\d+ any more"):
        wait_until(tend, "the session ends")


@pytest.mark.parametrize(
    ("own", "other", "model", "is_told"),
    [(1, 2, 0, True), (1, 1, 0, False), (0, 2, 0, False), (1, 0, 0, False), (1, 2, 1, False)],
)
def test_other_kernels_than_those_of_a_replica_are_told_of(
    rig: Rig, caplog: pytest.LogCaptureFixture, own: int, other: int, model: int, is_told: bool
) -> None:
    replica = rig.board.slot("engine", 1)
    rig.slot[EngineField.KERNELS] = own
    replica[EngineField.KERNELS], replica[EngineField.MODEL] = other, model
    rig.seat.compare_kernels(rig.board.of("engine"))
    told = f"engine 0 at {rig.seat.where} has other kernels or GPUs than engine 1: texts"
    assert (told in caplog.text) == is_told


def test_lost_prompts_count_as_taken_while_leases_are_renewed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taken_tokens, "IDLE_S", 0)
    rig.board.slot("tokenizer").add(TokenizerField.SENT_TOKENS, 7)
    for _ in range(3):
        rig.outbox.send(RenewLeases(), bytes(8))
        assert rig.inbox.wait(DEADLINE_MS)
        rig.seat.send_on(rig.inbox)
        rig.seat.settle_idle()
    assert engine_backlog(rig.board, 0)() == 0


def test_prompts_that_are_held_count_as_taken_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, num_held=7)
    backlog = engine_backlog(rig.board, 0)
    assert backlog() == 7
    rig.taken.take(7)
    assert backlog() == 0
    rig.close()
