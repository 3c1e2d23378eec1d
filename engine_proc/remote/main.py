"""Engine process: in the seat of an engine on another machine, which computes what comes here.
In: ToEngine (the ring), FromGateway (engine_proc).  Out: ToGateway, ToDetokenizer."""

import logging
import secrets
import time
from collections.abc import Iterable
from typing import NoReturn, assert_never

import msgspec

from headrace.board.backlog import engine_backlog
from headrace.board.board import MESSAGES_SENT, Slot
from headrace.board.fields import CommonField, EngineField
from headrace.config.process_configs import EngineConfig, RemoteEngine
from headrace.engine_proc.remote.grants import GRANT_S, ClockDifference, Grants
from headrace.engine_proc.remote.held_requests import HeldRequests
from headrace.engine_proc.remote.taken_tokens import TakenTokens
from headrace.engine_proc.request_io.mirrored_words import MirroredWords
from headrace.errors import HeadraceError
from headrace.exit_status import ExitStatus
from headrace.ipc.curve_key import read_key
from headrace.ipc.curve_links import CurveLink
from headrace.ipc.messages import ToEngine
from headrace.ipc.prefix_index import PrefixIndex
from headrace.ipc.remote_messages import (
    CachedPages,
    FromGateway,
    Grant,
    Outputs,
    SessionState,
    SessionStatus,
)
from headrace.ipc.sockets import STEP_HIGH_WATER, Frame, Inbox, Outbox, address, wait_for_any
from headrace.runtime.message_checks import (
    OutputLimits,
    WrongMessage,
    check,
    check_outputs,
    check_pages,
    check_status,
)
from headrace.runtime.placed_address import engine_address
from headrace.runtime.process import Context
from headrace.system.cpu_scheduling import take_turns

SECOND_NS = 10**9
SESSION_BITS = 63
WAIT_MS = 50
MAX_MESSAGES = 64  # of one side, before the other gets its turn
FULL_S = 3.0  # that a connection may take nothing

log = logging.getLogger(__name__)


class SessionEnded(HeadraceError):
    """The remote engine does not have the sequences of this session any more."""

    exit_status = ExitStatus.PEER_LOST


def main(config: EngineConfig, context: Context) -> NoReturn:
    """Serve by an engine on another machine; end when that is lost. Its successor begins anew."""
    assert config.remote is not None
    take_turns(is_urgent=True)  # it passes on, and computes nothing
    inbox: Inbox[ToEngine] = Inbox(address(config.run_dir, "engine", context.index), ToEngine)
    backlog = engine_backlog(context.board, context.index)
    taken = TakenTokens(context.slot, backlog, time.monotonic())
    held = HeldRequests()
    seat: RemoteSeat | None = None
    while seat is None or not seat.serves:
        context.slot.beat()
        held.take_all(inbox)
        where = engine_address(config.run_dir, context.index, config.remote)
        if where is not None and (seat is None or where != seat.where):
            if seat is not None:
                seat.close()
            seat = RemoteSeat(config, config.remote, where, context, taken)
        if seat is not None:
            seat.tend()
        wait_for_any(inbox.polled if seat is None else seat.polled, WAIT_MS)
    log.info("engine %d serves at %s", context.index, seat.where)
    context.ready()
    seat.compare_kernels(context.board.of("engine"))
    seat.release(held)
    while True:
        seat.send_on(inbox)
        seat.tend()
        seat.settle_idle()
        wait_for_any([*seat.polled, *inbox.polled], WAIT_MS)


class RemoteSeat:
    """A session with the engine at `where`: grants and messages there, words and outputs back.

    Args:
        taken: begun before any message is taken, since those that are held count once.
    """

    def __init__(
        self,
        config: EngineConfig,
        remote: RemoteEngine,
        where: str,
        context: Context,
        taken: TakenTokens,
    ) -> None:
        self.where = where
        self._remote = remote
        self._slot = context.slot
        self._frontends = list(context.board.of("frontend"))
        self._link = CurveLink(where, read_key(remote.key_file))
        self._outboxes = [
            Outbox(address(config.run_dir, "detokenizer", i), STEP_HIGH_WATER, self._keep_alive)
            for i in range(config.num_detokenizers)
        ]
        self._indexes = [PrefixIndex(fd) for fd in config.prefix_fds]
        for index in self._indexes:
            index.clear()
        self._session = new_session()
        self._grants = Grants(time.monotonic())
        self._clocks = ClockDifference()
        self._decoder: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)
        self._encoder = msgspec.msgpack.Encoder()
        self._told = ""
        self._taken = taken
        self._words = MirroredWords(self._slot)
        vocab_size = config.execution.vocab_size
        self._limits = OutputLimits(context.index, config.num_detokenizers, vocab_size)
        self._asked_at = 0.0  # whether anything listens there
        self.serves = False

    @property
    def polled(self) -> list[tuple[object, int]]:
        """What tells that there is something to do."""
        return self._link.polled

    def close(self) -> None:
        """Give up the links of a seat that does not serve."""
        self._link.close()
        for outbox in self._outboxes:
            outbox.close()

    def release(self, held: HeldRequests) -> None:
        """Send on what was kept until the engine served."""
        while held:
            self._send(held.pop())

    def send_on(self, inbox: Inbox[ToEngine]) -> None:
        """Send on what has come for the engine, up to a limit."""
        for _ in range(MAX_MESSAGES):
            frames = inbox.take_frames()
            if frames is None:
                return
            self._send(frames)

    def compare_kernels(self, engines: Iterable[Slot]) -> None:
        """Log it where another engine of the model has other kernels or GPUs."""
        own, model = (self._slot[field] for field in (EngineField.KERNELS, EngineField.MODEL))
        for slot in engines:
            is_replica = slot[EngineField.MODEL] == model
            if own and is_replica and slot[EngineField.KERNELS] not in (0, own):
                log.warning(
                    "%s at %s has other kernels or GPUs than %s: texts that move between them may "
                    "change; take machines of the same kind (`headrace doctor` names both)",
                    self._slot.seat,
                    self.where,
                    slot.seat,
                )
                return

    def settle_idle(self) -> None:
        """Correct the count of taken tokens when the engine has had nothing to do for a while."""
        self._taken.settle_idle(time.monotonic())

    def _send(self, frames: list[Frame]) -> None:
        until = time.monotonic() + FULL_S
        while not self._link.send(frames):
            self.tend()
            if time.monotonic() > until:
                self._grants.lose()
            wait_for_any(self.polled, int(1000 * GRANT_S))

    def tend(self) -> None:
        """Take what has come from the engine's machine, and keep the session alive.

        Raises:
            SessionEnded: the engine has stopped.
        """
        for _ in range(MAX_MESSAGES):
            frames = self._link.receive()
            if frames is None:
                self._grants.judge(time.monotonic())
                break
            try:
                self._take(frames)
            except (msgspec.MsgspecError, WrongMessage) as error:
                raise SessionEnded(
                    f"the engine at {self.where} sends what is wrong: {error}"
                ) from None
        if self._link.lost_connections():
            self._tell(
                f"{self.where} closes the connection: it has no engine, or another key "
                f"than {self._remote.key_file}"
            )
            if self.serves:
                self._grants.lose()
        if self._slot[EngineField.LOST_SESSION] == self._session:
            self._grants.lose()
        self._keep_alive()

    def _keep_alive(self) -> None:
        """Grant more time when it is due. Give the engine up when it has none left, or has ended.

        Raises:
            SessionEnded: it is given up.
        """
        self._slot.beat()
        sent_at = time.monotonic_ns()
        now = sent_at / SECOND_NS
        if self._grants.are_due(now):
            self._grants.granted(now)
            self._grant(sent_at)
        has_run_out = self._grants.have_run_out(now)
        if self.serves and has_run_out:
            raise SessionEnded(f"the engine at {self.where} cannot be heard")
        if self.serves and self._grants.is_lost and now > self._asked_at + GRANT_S:
            self._asked_at = now
            if self._link.is_refused():
                raise SessionEnded(f"nothing listens at {self.where} any more")
        if self.serves or not has_run_out:
            return
        self._tell(f"waiting for an engine at {self.where}")
        self._grants = Grants(now)

    def _grant(self, sent_at: int) -> None:
        grant = Grant(
            session=self._session,
            sent_at=sent_at,
            clock_ahead=self._clocks.ahead,
            engine=self._slot.seat.index,
            starts=[slot[CommonField.STARTS] for slot in self._frontends],
            terms=self._remote.terms,
        )
        self._link.send([self._encoder.encode(grant)])

    def _take(self, frames: list[Frame]) -> None:
        message = self._decoder.decode(frames[0])
        if message.session != self._session:
            return
        match message:
            case SessionStatus():
                self._note(message, frames[1:])
            case Outputs():
                steps = frames[1:]
                check_outputs(message, steps, self._limits)
                self._slot.add(MESSAGES_SENT + message.detokenizer, len(steps) // 2)
                self._outboxes[message.detokenizer].send_frames(steps)
            case CachedPages():
                check_pages(message, frames[1:])
                if message.index < len(self._indexes):
                    self._indexes[message.index].write(message.places, frames[1])
            case _:
                assert_never(message)

    def _note(self, status: SessionStatus, words: list[Frame]) -> None:
        """Note the state of the session.

        Raises:
            SessionEnded: it is over.
        """
        now = time.monotonic_ns()
        check_status(status, now)
        self._grants.answered(status.granted_at / SECOND_NS)
        self._clocks.observe(status.granted_at, status.at, now)
        if status.state == SessionState.SERVING:
            does_fit = len(words) == 1 and self._words.take(words[0])
            check(does_fit, "the engine's words do not fit")
            self._taken.take(status.num_taken)
            self.serves = True
            self._slot[EngineField.SESSION] = self._session
            return
        if self.serves:
            raise SessionEnded(f"the engine at {self.where}: {status.why}")
        self._tell(status.why and f"{self.where}: {status.why}")
        if status.state == SessionState.LOST:
            self._session = new_session()

    def _tell(self, why: str) -> None:
        """Log why the engine does not serve, once."""
        if why and why != self._told and not self.serves:
            log.warning("%s; trying again", why)
            self._told = why


def new_session() -> int:
    """Return the number of a session, which is not 0."""
    return secrets.randbits(SESSION_BITS) or 1
