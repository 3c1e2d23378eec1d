"""The way to this engine from a server on another machine, in the engine's process.
In: ToGateway (engine_proc).  Out: FromGateway."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from headrace.board.backlog import detokenizer_backlog, engine_backlog
from headrace.board.board import State
from headrace.board.fields import CommonField, DetokenizerField, EngineField, TokenizerField
from headrace.config.process_configs import GatewayConfig
from headrace.engine_proc.gateway.page_changes import PageChanges
from headrace.engine_proc.gateway.session import Session
from headrace.engine_proc.request_io.mirrored_words import read_words
from headrace.engine_proc.request_io.turn import MESSAGE_BYTES
from headrace.ipc.curve_key import read_key
from headrace.ipc.curve_links import CurveListener, PeerLeft
from headrace.ipc.messages import (
    Abort,
    GenerateRequest,
    StepOutput,
    Times,
    ToEngine,
)
from headrace.ipc.prefix_index import PrefixIndex
from headrace.ipc.remote_messages import (
    NO_SESSION,
    CachedPages,
    Grant,
    Member,
    Outputs,
    SessionState,
    SessionStatus,
    ToGateway,
    differences,
)
from headrace.ipc.sockets import Frame, wait_for_any
from headrace.runtime.process import Context

WAIT_MS = 50
LOOK_NS = 25_000_000  # between looks at the session, where something changes
MAX_MESSAGES = 64  # of the peer, before the engine gets its turn
HISTOGRAMS_NS = 10**9
MAX_UNREAD_BYTES = 1 << 28  # of messages that wait for the engine: no server sends so many
SILENCE = "the server has not been heard for too long"
BROKEN = "a connection that its steps go by has broken"
PEERS = ("frontend", "tokenizer", "detokenizer")  # in whose seats a gateway is

log = logging.getLogger(__name__)


class Gateway:
    """It is frontend, tokenizer and detokenizer to the engine, whose thread it works in.

    While the engine does something else, such as to wait for its workers, a thread of its own
    answers the peer. The lock is for all that either of them does here.
    """

    def __init__(self, config: GatewayConfig, context: Context) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._config = config
        self._peers = [slot for role in PEERS for slot in context.board.of(role)]
        self._frontends = list(context.board.of("frontend"))
        self._tee = context.tee
        self._tokenizer = context.board.slot("tokenizer")
        self._detokenizers = list(context.board.of("detokenizer"))
        self._engine = context.slot
        self._backlog = engine_backlog(context.board, 0)
        self._listener = CurveListener(config.listen, read_key(config.key_file), "--engine-listen")
        for index in range(len(self._detokenizers)):
            detokenizer_backlog(context.board, index).settle()
        self._unread: deque[tuple[ToEngine, Frame]] = deque()  # for the engine,
        self._unread_bytes = 0
        self._pages = [PageChanges(PrefixIndex(fd)) for fd in config.prefix_fds]
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToGateway)
        self._encoder = msgspec.msgpack.Encoder()
        self._session: Session | None = None
        self._lost = 0  # the last one
        self._looked_at = self._histograms_at = 0
        self._close_frontends()
        for slot in self._peers:
            slot.enter(State.READY)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._attend, name="gateway", daemon=True)
        self._is_closed = threading.Event()
        log.info("the engine of %s is at %s", config.terms["model"], self._listener.where)

    def start(self) -> None:
        """Begin to answer the peer while the engine does something else."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening: the server finds nothing at the address, and moves its streams."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()

    def _attend(self) -> None:
        while not self._is_closed.wait(WAIT_MS / 1000):
            if self._lock.acquire(blocking=False):  # else the engine's thread does it
                try:
                    self._take_all()
                    self._look()
                finally:
                    self._lock.release()

    def receive(self, timeout_ms: int) -> tuple[ToEngine, Frame] | None:
        """Return the next message to the engine with its frame, or None after `timeout_ms`."""
        until = time.monotonic_ns() + 1_000_000 * timeout_ms
        with self._lock:
            while not self._unread:
                if self._take_next():
                    continue
                now = time.monotonic_ns()
                if now >= until:
                    return None
                if now >= self._looked_at + LOOK_NS:
                    self._look()
                wait_for_any(self._listener.polled, min(-(-(until - now) // 1_000_000), WAIT_MS))
            message, frame = self._unread.popleft()
            self._unread_bytes -= MESSAGE_BYTES + len(frame)
            return message, frame

    def outbox(self, detokenizer: int) -> "RemoteDetokenizer":
        """Return the way of steps to a detokenizer of the server."""
        return RemoteDetokenizer(partial(self._send_steps, detokenizer))

    def _send_steps(self, detokenizer: int, steps: Sequence[tuple[StepOutput, Frame]]) -> None:
        """Send steps as one message, waiting while the peer has no room; it may be gone."""
        self._detokenizers[detokenizer].add(DetokenizerField.MESSAGES_TAKEN, len(steps))
        with self._lock:
            session = self._session
            if session is None or not session.serves:
                return
            if self._has_lapsed(session):
                self._end(session, SILENCE)
                return
            frames: list[Frame] = [self._encoder.encode(Outputs(session.id, detokenizer))]
            for step in steps:
                frames += self._adapted(session, *step)
            outlet = session.outlet(detokenizer)  # this one, whatever the session does meanwhile
            try:
                while not self._listener.try_send(outlet, frames):
                    self._engine.beat()
                    wait_for_any(self._listener.polled, WAIT_MS)
                    self._take_all()
                    self._look()
                    if self._session is not session:
                        return
            except PeerLeft:  # steps may be lost with it, so none may follow by another way
                self._end(session, BROKEN)

    def _has_lapsed(self, session: Session) -> bool:
        """Whether the engine has no time left. What has come is read first: it may be a grant."""
        while session.has_lapsed(time.monotonic_ns()):
            if not self._take_next():
                return True
        return False

    def _take_all(self) -> None:
        """Take what has come from peers, up to a limit."""
        for _ in range(MAX_MESSAGES):
            if not self._take_next():
                return

    def _take_next(self) -> bool:
        """Take a message of a peer; return whether there was one. Else admit peers."""
        received = self._listener.receive()
        if received is None:
            self._listener.admit()
            return False
        self._take(*received)
        return True

    def _look(self) -> None:
        """Do what is due at times."""
        for slot in self._peers:
            slot.beat()
        self._listener.admit()
        self._looked_at = time.monotonic_ns()
        self._look_after_session()

    def _take(self, peer: bytes, frames: list[Frame]) -> None:
        """Handle a message of a peer. One that has no session has grants alone."""
        try:
            head = self._decoder.decode(frames[0])
            if isinstance(head, Grant):
                self._take_grant(peer, head)
                return
            session = self._session
            if isinstance(head, Member):
                self._take_of_member(peer, head, frames[1:])
            elif session is not None and session.serves and peer == session.peer:
                self._take_all_of(session, frames)
        except msgspec.MsgspecError as error:
            log.warning("a server of another version: %s", error)

    def _take_of_member(self, peer: bytes, member: Member, requests: list[Frame]) -> None:
        """Take requests of a member. Without requests it asks whether its session is here."""
        session = self._session
        if session is None or not session.serves or session.id != member.session:
            session = None
        elif 0 <= member.detokenizer < len(self._detokenizers):
            session.attach(member.detokenizer, peer)
        if not requests:
            answer = Member(session.id if session else NO_SESSION, member.detokenizer)
            self._listener.send(peer, [self._encoder.encode(answer)])
        elif session is not None:
            self._take_all_of(session, requests)

    def _take_all_of(self, session: Session, frames: list[Frame]) -> None:
        """Have the messages of a session wait for the engine, as long as it lasts."""
        for start in range(0, len(frames), 2):  # a lone message may have no bulk
            pair = frames[start : start + 2]
            if self._session is not session:
                return
            if self._tee is not None:
                self._tee.take(pair)
            message: ToEngine = self._decoder.decode(pair[0])
            self._send_on(session, message, pair[1] if len(pair) > 1 else b"")

    def _send_on(self, session: Session, message: ToEngine, frame: Frame) -> None:
        """Have a message wait for the engine. The session ends where too much does."""
        num_bytes = len(frame)
        self._unread_bytes += MESSAGE_BYTES + num_bytes
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._end(session, f"over {MAX_UNREAD_BYTES >> 20} MiB wait for the engine")
            return
        session.sent(message, num_bytes)
        if isinstance(message, GenerateRequest):
            self._tokenizer.add(TokenizerField.SENT_TOKENS, num_bytes // 4)
        self._unread.append((message, frame))

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
            for pages in self._pages:
                pages.begin()
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

    def _adapted(self, session: Session, output: StepOutput, tokens: Frame) -> list[Frame]:
        """Return a step as the server's engine would have sent it."""
        session.came(output)
        times = {id: shifted(each, session.clock_ahead) for id, each in output.times.items()}
        output = msgspec.structs.replace(output, engine=session.engine, times=times)
        return [self._encoder.encode(output), tokens]

    def _look_after_session(self) -> None:
        """Begin or end the session where that is due, and tell its peer what has changed."""
        session = self._session
        if session is None:
            return
        if self._has_lapsed(session):
            self._end(session, SILENCE)
        elif session.serves:
            if session.differs(self._engine.work):
                self._send_status(session)
        elif session.is_clock_known and self._is_idle:
            self._begin(session)

    @property
    def _is_ready(self) -> bool:
        return self._engine[CommonField.STATE] == State.READY

    @property
    def _is_idle(self) -> bool:
        """Whether the engine serves, has nothing to do, and nothing waits for it."""
        is_free = not self._engine[EngineField.IS_BUSY] and self._backlog() <= 0
        return self._is_ready and is_free and not self._unread

    def _begin(self, session: Session) -> None:
        session.state = SessionState.SERVING
        self._open_frontends(session)
        self._histograms_at = 0
        log.info("a server has the engine as its engine %d", session.engine)
        self._send_status(session)

    def _end(self, session: Session, why: str) -> None:
        """End a session and all that the engine does for it."""
        log.warning("the session ends: %s", why)
        self._drop_unread()
        for request in session.requests:
            self._unread.append((Abort(request), b""))
            self._unread_bytes += MESSAGE_BYTES
        self._close_frontends()
        session.state = SessionState.LOST
        self._send_status(session, why)
        self._lost = session.id
        self._session = None

    def _drop_unread(self) -> None:
        """Drop what the engine has not taken of a session."""
        counts = [len(ids) // 4 for one, ids in self._unread if isinstance(one, GenerateRequest)]
        self._tokenizer.add(TokenizerField.SENT_TOKENS, -sum(counts))
        self._unread.clear()
        self._unread_bytes = 0

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
        now = time.monotonic_ns()
        frames: list[Frame] = []
        num_taken = session.num_tokens - max(self._backlog(), 0)  # before it counts as busy
        if session.serves:
            with_histograms = now >= self._histograms_at + HISTOGRAMS_NS
            if with_histograms:
                self._histograms_at = now
            frames = [read_words(self._engine, session.clock_ahead, with_histograms)]
        elif not why and not self._is_idle:
            why = "the engine ends other requests" if self._is_ready else "the engine starts"
        status = SessionStatus(session.id, session.granted_at, now, session.state, why, num_taken)
        self._listener.send(session.peer, [self._encoder.encode(status), *frames])
        if session.serves:
            self._send_pages(session, now)

    def _send_pages(self, session: Session, now: int) -> None:
        """Tell the peer which pages the engine and its store have, when that is due."""
        for index, pages in enumerate(self._pages):
            changes = pages.take(now)
            if changes is None:
                continue
            places, words = changes
            head = self._encoder.encode(CachedPages(session.id, places, index))
            if not self._listener.send(session.peer, [head, words]):
                pages.begin()  # lost: all come again


def shifted(times: Times, clock_ahead: int) -> Times:
    """Return a sequence's times with those of its engine by the server's clock."""
    return msgspec.structs.replace(
        times,
        queued=times.queued and times.queued + clock_ahead,
        scheduled=times.scheduled and times.scheduled + clock_ahead,
        first_token=times.first_token and times.first_token + clock_ahead,
    )


class RemoteDetokenizer:
    """The way of steps to a detokenizer, as an `Outbox` is.

    Args:
        send_all: sends steps with their frames as one message, waiting while there is no room.
    """

    def __init__(self, send_all: Callable[[Sequence[tuple[StepOutput, Frame]]], None]) -> None:
        self.send_all = send_all

    def close(self) -> None:
        """Do nothing: the gateway stays as long as its process does."""
