"""Gateway process: the way to an engine of this machine from a server on another one.
In: ToGateway (engine_proc), ToDetokenizer (engine_proc).  Out: ToEngine, FromGateway."""

import logging
import time
from typing import Any, NoReturn

import msgspec

from headrace.board.backlog import detokenizer_backlog, engine_backlog
from headrace.board.board import State
from headrace.board.fields import (
    CommonField,
    DetokenizerField,
    EngineField,
    GatewayField,
    TokenizerField,
)
from headrace.config.process_configs import GatewayConfig
from headrace.engine_proc.gateway.page_changes import PageChanges
from headrace.engine_proc.gateway.session import Session
from headrace.engine_proc.request_io.mirrored_words import read_words
from headrace.ipc.curve_key import read_key
from headrace.ipc.curve_links import CurveListener
from headrace.ipc.messages import (
    Abort,
    GenerateRequest,
    StepOutput,
    Times,
    ToDetokenizer,
    ToEngine,
)
from headrace.ipc.prefix_index import PrefixIndex
from headrace.ipc.remote_messages import (
    CachedPages,
    Grant,
    Outputs,
    SessionState,
    SessionStatus,
    ToGateway,
    differences,
)
from headrace.ipc.sockets import STEP_HIGH_WATER, Frame, Inbox, Outbox, address, wait_for_any
from headrace.runtime.process import Context

WAIT_MS = 50
IDLE_S = 0.5  # without outputs, between looks at whether some are lost
MAX_MESSAGES = 64  # of one side, before the other gets its turn
STATUS_NS = 25_000_000  # between statuses at most, where something changes
HISTOGRAMS_NS = 10**9
PEERS = ("frontend", "tokenizer", "detokenizer")  # in whose seats a gateway is

log = logging.getLogger(__name__)


def main(config: GatewayConfig, context: Context) -> NoReturn:
    """Serve until SIGTERM."""
    gateway = Gateway(config, context)
    log.info("the engine of %s is at %s", config.terms["model"], gateway.where)
    context.ready()
    while True:
        gateway.work()


class Gateway:
    """A gateway at work: it is frontend, tokenizer and detokenizer to the engine."""

    def __init__(self, config: GatewayConfig, context: Context) -> None:
        self._config = config
        self._slot = context.slot
        self._peers = [slot for role in PEERS for slot in context.board.of(role)]
        self._frontends = list(context.board.of("frontend"))
        self._tokenizer = context.board.slot("tokenizer")
        self._detokenizers = list(context.board.of("detokenizer"))
        self._engine = context.board.slot("engine")
        self._backlog = engine_backlog(context.board, 0)
        self._listener = CurveListener(config.listen, read_key(config.key_file), "--engine-listen")
        self.where = self._listener.where
        self._inboxes: list[Inbox[ToDetokenizer]] = [
            Inbox(address(config.run_dir, "detokenizer", i), ToDetokenizer, STEP_HIGH_WATER)
            for i in range(len(self._detokenizers))
        ]
        self._unread = [
            detokenizer_backlog(context.board, i) for i in range(len(self._detokenizers))
        ]
        for backlog in self._unread:
            backlog.settle()
        self._received_at = 0.0
        self._outbox = self._connect()
        self._pages = PageChanges(PrefixIndex(config.prefix_fd))
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToGateway)
        self._encoder = msgspec.msgpack.Encoder()
        self._session: Session | None = None
        self._lost = 0  # the last one
        self._held: dict[int, list[Frame]] = {}  # by detokenizer, what the peer has no room for
        self._num_deaths = 0
        self._status_at = self._histograms_at = 0
        self._close_frontends()
        for slot in self._peers:
            slot.enter(State.READY)

    def _connect(self) -> Outbox:
        return Outbox(address(self._config.run_dir, "engine"), on_wait=self._slot.beat)

    def work(self) -> None:
        """Handle all that has come; wait where there is nothing."""
        for slot in (self._slot, *self._peers):
            slot.beat()
        polled = [*self._listener.polled]
        for index, inbox in enumerate(self._inboxes):
            polled += inbox.polled if index not in self._held else []
        wait_for_any(polled, WAIT_MS)
        self._listener.admit()
        for _ in range(MAX_MESSAGES):
            received = self._listener.receive()
            if received is None:
                break
            self._take(*received)
        for index in range(len(self._inboxes)):
            self._send_outputs(index)
        self._settle_idle()
        self._look_after_session()

    def _settle_idle(self) -> None:
        """Count outputs as lost that have not come for long: a dead engine has taken them along."""
        now = time.monotonic()
        if now >= self._received_at + IDLE_S and not self._held:
            self._received_at = now
            for backlog in self._unread:
                backlog.settle_idle()

    def _take(self, peer: bytes, frames: list[Frame]) -> None:
        """Handle a message of a peer. One that has no session has grants alone."""
        for start in range(0, len(frames), 2):  # a lone message may have no bulk
            pair = frames[start : start + 2]
            try:
                message = self._decoder.decode(pair[0])
            except msgspec.MsgspecError as error:
                log.warning("a server of another version: %s", error)
                return
            session = self._session
            if isinstance(message, Grant):
                self._take_grant(peer, message)
            elif session is not None and peer == session.peer and session.serves:
                self._send_on(session, message, pair)

    def _send_on(self, session: Session, message: ToEngine, frames: list[Frame]) -> None:
        """Send the engine a message with its frame."""
        num_bytes = sum(map(len, frames[1:]))
        session.sent(message, num_bytes)
        if isinstance(message, GenerateRequest):
            self._tokenizer.add(TokenizerField.SENT_TOKENS, num_bytes // 4)
        self._outbox.send_frames(frames)
        self._slot.add(GatewayField.SENT_ON)

    def _take_grant(self, peer: bytes, grant: Grant) -> None:
        now = time.monotonic_ns()
        session = self._session
        differing = differences(grant.terms, self._config.terms)
        if differing:
            self._answer(peer, grant, SessionState.REFUSED, differing)
        elif session is None:
            if grant.session == self._lost:
                self._answer(peer, grant, SessionState.LOST, "it has ended")
                return
            self._session = session = Session(peer, grant, now)
            self._outbox.close()
            self._outbox = self._connect()
            self._pages.begin()
            self._send_status(session)
        elif peer != session.peer:
            self._answer(peer, grant, SessionState.WAITING, "another server has the engine")
        else:
            session.renew(grant, now)
            if session.serves:
                self._open_frontends(session)
            self._send_status(session)

    def _answer(self, peer: bytes, grant: Grant, state: SessionState, why: str) -> None:
        now = time.monotonic_ns()
        status = SessionStatus(grant.session, grant.sent_at, now, state, why)
        self._listener.send(peer, [self._encoder.encode(status)])

    def _send_outputs(self, detokenizer: int) -> None:
        """Send on the steps that have come for a detokenizer, as one message."""
        frames = self._held.pop(detokenizer, None)
        session = self._session
        if frames is None:
            frames = []
            while len(frames) < 2 * STEP_HIGH_WATER:
                received = self._inboxes[detokenizer].receive(0)
                if received is None:
                    break
                self._received_at = time.monotonic()
                self._detokenizers[detokenizer].add(DetokenizerField.MESSAGES_TAKEN)
                if session is not None and session.serves:
                    frames += self._adapted(session, *received)
        if not frames or session is None or not session.serves:
            return
        head = self._encoder.encode(Outputs(session.id, detokenizer))
        if not self._listener.send(session.peer, [head, *frames]):
            self._held[detokenizer] = frames

    def _adapted(self, session: Session, output: StepOutput, tokens: Frame) -> list[Frame]:
        """Return a step as the server's engine would have sent it."""
        session.came(output)
        self._slot.add(GatewayField.OUTPUTS)
        times = {id: shifted(each, session.clock_ahead) for id, each in output.times.items()}
        output = msgspec.structs.replace(output, engine=session.engine, times=times)
        return [self._encoder.encode(output), tokens]

    def _look_after_session(self) -> None:
        """Begin or end the session where that is due, and tell its peer what has changed."""
        session = self._session
        if session is None:
            return
        now = time.monotonic_ns()
        if session.has_lapsed(now):
            self._end(session, "the server has not been heard for too long")
        elif session.serves:
            if self._engine[CommonField.DEATHS] != self._num_deaths or not self._is_ready:
                self._end(session, "its process has ended")
            elif now >= self._status_at + STATUS_NS and session.differs(self._engine.work):
                self._send_status(session)
        elif session.is_clock_known and self._is_idle:
            self._begin(session)

    @property
    def _is_ready(self) -> bool:
        return self._engine[CommonField.STATE] == State.READY

    @property
    def _is_idle(self) -> bool:
        """Whether the engine serves, has nothing to do, and nothing of it is on its way."""
        is_free = not self._engine[EngineField.IS_BUSY] and self._backlog() <= 0
        return self._is_ready and is_free and not self._has_unread

    @property
    def _has_unread(self) -> bool:
        """Whether outputs of the engine have not been sent on."""
        return bool(self._held) or any(backlog() > 0 for backlog in self._unread)

    def _begin(self, session: Session) -> None:
        session.state = SessionState.SERVING
        self._num_deaths = self._engine[CommonField.DEATHS]
        self._open_frontends(session)
        self._histograms_at = 0
        log.info("a server has the engine as its engine %d", session.engine)
        self._send_status(session)

    def _end(self, session: Session, why: str) -> None:
        """End a session and all that the engine does for it."""
        log.warning("the session ends: %s", why)
        for request in session.requests:
            self._outbox.try_send(Abort(request))
        self._close_frontends()
        session.state = SessionState.LOST
        self._send_status(session, why)
        self._lost = session.id
        self._session = None
        self._held.clear()

    def _open_frontends(self, session: Session) -> None:
        """Have the engine know the server's frontends."""
        for slot, starts in zip(self._frontends, session.starts, strict=True):
            slot[CommonField.STARTS] = starts

    def _close_frontends(self) -> None:
        """Have the engine abort what is left: no frontend has sent it."""
        for slot in self._frontends:
            slot[CommonField.STARTS] = 0

    def _send_status(self, session: Session, why: str = "") -> None:
        """Tell the peer of the session and of the engine."""
        now = self._status_at = time.monotonic_ns()
        frames: list[Frame] = []
        num_taken = session.num_tokens - max(self._backlog(), 0)  # before it counts as busy
        if session.serves:
            with_histograms = now >= self._histograms_at + HISTOGRAMS_NS
            if with_histograms:
                self._histograms_at = now
            frames = [
                read_words(
                    self._engine, session.clock_ahead, lambda: self._has_unread, with_histograms
                )
            ]
        elif not why and not self._is_idle:
            why = "the engine ends other requests" if self._is_ready else "the engine starts"
        status = SessionStatus(session.id, session.granted_at, now, session.state, why, num_taken)
        self._listener.send(session.peer, [self._encoder.encode(status), *frames])
        if session.serves and (changes := self._pages.take(now)) is not None:
            places, words = changes
            pages = self._encoder.encode(CachedPages(session.id, places))
            if not self._listener.send(session.peer, [pages, words]):
                self._pages.begin()  # lost: all come again


def shifted(times: Times, clock_ahead: int) -> Times:
    """Return a sequence's times with those of its engine by the server's clock."""
    moments = ("queued", "scheduled", "first_token")
    known = {name: getattr(times, name) for name in moments}
    return msgspec.structs.replace(
        times, **{name: at + clock_ahead for name, at in known.items() if at}
    )
