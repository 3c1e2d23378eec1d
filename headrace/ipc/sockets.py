"""ZeroMQ links. The receiver binds, senders connect; every queue has a high-water mark.

A message is one frame, or two with bulk: the encoded Struct, then bytes that are not copied into
it. Several messages with bulk may travel as one, at little more than the cost of one. Links live in
the server's run directory, one socket file per receiver.
"""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import zmq

from headrace.ipc.messages import Message
from headrace.ipc.recorder import Tee

if TYPE_CHECKING:
    import asyncio

M = TypeVar("M")

HIGH_WATER = 1024  # messages per link: at one per 5 ms step, 5 s of a receiver that does nothing
# Steps on their way to a detokenizer. A faster engine waits for it: output sent ahead would come no
# sooner. Sequences that join meanwhile share its next steps.
STEP_HIGH_WATER = 8
# Batches of reports on their way to the telemetry process: some seconds of each frontend's.
REPORTS_HIGH_WATER = 16
WAIT_MS = 500  # for a receiver, until `on_wait` is called
MAX_DRAINED = 4  # messages that are handled before an event loop does something else
COPIED_BYTES = 64 << 10  # are copied in less time than it takes to share them
# As numbers: to join flags of an enumeration takes longer than to send.
NOBLOCK, SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
POLLIN = int(zmq.POLLIN)
SEND: Any = zmq.backend.Socket.send  # by way of pyzmq's Python it takes half as long again
Frame = bytes | memoryview


def address(run_dir: str, receiver: str, index: int = 0) -> str:
    """Return where `receiver` number `index` listens."""
    return f"ipc://{Path(run_dir) / f'{receiver}-{index}'}.sock"


class Inbox(Generic[M]):
    """The bound end of a link, many senders to one receiver. `kind` is the union it takes."""

    def __init__(
        self, where: str, kind: Any, high_water: int = HIGH_WATER, tee: Tee | None = None
    ) -> None:
        """Listen; `tee` records what comes.

        Raises:
            OSError: the disk is full, say.
        """
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, high_water)
        try:
            self._socket.bind(where)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror, where) from None
        self._polled: list[tuple[Any, int]] = [(self._socket, POLLIN)]
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._unread: deque[zmq.Frame] = deque()  # what has come along with the last message
        self._detach: Callable[[], Any] = lambda: None
        self._tee = tee

    def wait(self, timeout_ms: int) -> bool:
        """Return whether there is a message, as soon as there is one."""
        return bool(self._unread) or bool(zmq.zmq_poll(self._polled, timeout_ms))

    @property
    def polled(self) -> list[tuple[Any, int]]:
        """For `wait_for_any`: what tells that there is a message, once all before it are read."""
        return self._polled

    def take_frames(self) -> list[Frame] | None:
        """Return the frames of what has come together, undecoded, or None."""
        if not (self._unread or self._fetch()):
            return None
        frames: list[Frame] = [frame.buffer for frame in self._unread]
        self._unread.clear()
        return frames

    def receive(self, timeout_ms: int) -> tuple[M, Frame] | None:
        """Return the next message and its bulk (b"" without), or None after `timeout_ms`."""
        unread = self._unread
        is_here = bool(unread) or self._fetch()
        if not is_here and timeout_ms:  # waiting costs more than fetching
            is_here = self.wait(timeout_ms) and self._fetch()
        if not is_here:
            return None
        message = self._decoder.decode(unread.popleft().buffer)
        return message, unread.popleft().buffer if unread else b""

    def _fetch(self) -> bool:
        """Receive a message from the link; return whether there was one."""
        if not zmq.zmq_poll(self._polled, 0):  # to be refused costs three times as much
            return False
        self._unread += receive_whole(self._socket)
        if self._tee is not None:
            self._tee.take([frame.buffer for frame in self._unread])
        return True

    def attach(self, loop: "asyncio.AbstractEventLoop", handle: Callable[[M, Frame], None]) -> None:
        """Call `handle` from `loop` for each message that comes."""

        def drain() -> None:
            # The descriptor is edge-triggered: what is left unread here is not announced again.
            if self._socket.closed:
                return
            for _ in range(MAX_DRAINED):
                received = self.receive(0)
                if received is None:
                    return
                handle(*received)
            loop.call_soon(drain)

        fd = self._socket.fileno()
        loop.add_reader(fd, drain)
        loop.call_soon(drain)
        self._detach = lambda: loop.remove_reader(fd)

    def close(self) -> None:
        """Stop listening; unread messages are lost."""
        self._detach()
        self._socket.close(linger=0)


class Outbox:
    """The connected end of a link. While it waits for a receiver, it calls `on_wait` regularly."""

    def __init__(
        self,
        where: str,
        high_water: int = HIGH_WATER,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, high_water)
        self._socket.set(zmq.SNDTIMEO, WAIT_MS)
        self._on_wait = on_wait
        self._socket.connect(where)
        self._encoder = msgspec.msgpack.Encoder()
        self._end: Frame | None = None  # of what has been put: something may follow it

    def send(self, message: Message, bulk: Frame | None = None) -> None:
        """Send, waiting while the link is full: the receiver sets the pace."""
        self._send(self._frames(message, bulk), 0, is_to_copy(bulk))

    def send_all(self, messages: Sequence[tuple[Message, Frame]]) -> None:
        """Send messages with their bulk, as `send` does."""
        self.send_frames([frame for message in messages for frame in self._frames(*message)])

    def send_frames(self, frames: list[Frame]) -> None:
        """Send encoded messages with their bulk as one, waiting while the link is full."""
        if frames:
            self._send(frames, 0, True)

    def try_send(self, message: Message, bulk: Frame | None = None) -> bool:
        """Send without ever waiting; return False, with nothing sent, where the link is full."""
        try:
            self._send(self._frames(message, bulk), NOBLOCK, is_to_copy(bulk))
        except zmq.Again:
            return False
        return True

    def try_put(self, message: Message, bulk: Frame) -> bool:
        """Send as `try_send` does, as one with all that is put until `flush`: that wakes once."""
        frames: list[Frame] = [self._encoder.encode(message)]
        if self._end is not None:
            frames.insert(0, self._end)
            self._end = None
        try:
            for frame in frames:
                self._send_frame(frame, NOBLOCK | SNDMORE, is_to_copy(frame))
        except zmq.Again:
            return False
        self._end = bulk
        return True

    def flush(self) -> None:
        """Hand over the put message. There is room for it, since there was for its beginning."""
        if self._end is not None:
            self._send_frame(self._end, NOBLOCK, is_to_copy(self._end))
            self._end = None

    def _send(self, frames: list[Frame], flags: int, copies: bool) -> None:
        """Send frames as one message: all of them, or none."""
        last = frames.pop()
        for frame in frames:
            self._send_frame(frame, flags | SNDMORE, copies)
        self._send_frame(last, flags, copies)

    def _send_frame(self, frame: Frame, flags: int, copies: bool) -> None:
        while True:
            try:
                SEND(self._socket, frame, flags, copies)
            except zmq.Again:
                if flags & NOBLOCK:
                    raise
                self._on_wait()
            else:
                return

    def _frames(self, message: Message, bulk: Frame | None) -> list[Frame]:
        encoded = self._encoder.encode(message)
        return [encoded] if bulk is None else [encoded, bulk]

    def close(self) -> None:
        """Close the link and drop its undelivered messages."""
        self._socket.close(linger=0)


def wait_for_any(polled: list[tuple[Any, int]], timeout_ms: int) -> bool:
    """Wait until one of several links has a message; return whether one has."""
    return bool(zmq.zmq_poll(polled, timeout_ms))


def receive_whole(socket: "zmq.Socket[bytes]") -> list[zmq.Frame]:
    """Return the frames of a message that is there; recv_multipart takes three times as long."""
    frames = [socket.recv(NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(copy=False))
    return frames


def send_whole(socket: "zmq.Socket[bytes]", frames: list[Frame]) -> None:
    """Send frames as one message; send_multipart takes three times as long.

    Raises:
        zmq.ZMQError: the link takes none of them now.
    """
    for frame in frames[:-1]:
        SEND(socket, frame, NOBLOCK | SNDMORE, is_to_copy(frame))
    SEND(socket, frames[-1], NOBLOCK, is_to_copy(frames[-1]))


def deliver(patience_ms: int) -> None:
    """Close all links of this process once what was sent has left it, or after some time."""
    zmq.Context.instance().destroy(linger=patience_ms)


def is_to_copy(bulk: Frame | None) -> bool:
    """Whether bulk is copied: all but large `bytes`, which cannot change while they are sent."""
    return not isinstance(bulk, bytes) or len(bulk) < COPIED_BYTES
