"""ZeroMQ links. The receiver binds, senders connect; every queue has a high-water mark.

A message is one frame, or two with bulk: the encoded Struct, then bytes that are not copied into
it. Several messages with bulk may travel as one, at little more than the cost of one. Links live in
the server's run directory, one socket file per receiver.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from headrace.messages import Message

M = TypeVar("M")

HIGH_WATER = 1024  # messages per link: at one per 5 ms step, 5 s of a receiver that does nothing
# Steps on their way to a detokenizer. An engine that is faster waits for it: what it could send
# ahead would come no sooner, and the sequences that join meanwhile share its next steps.
STEP_HIGH_WATER = 8
MAX_DRAINED = 4  # messages that are handled before an event loop does something else
COPIED_BYTES = 64 << 10  # are copied in less time than it takes to share them
Frame = bytes | memoryview


def address(run_dir: str, receiver: str, index: int = 0) -> str:
    """Return where `receiver` number `index` listens."""
    return f"ipc://{Path(run_dir) / f'{receiver}-{index}'}.sock"


class Inbox(Generic[M]):
    """The bound end of a link, many senders to one receiver. `kind` is the union it takes."""

    def __init__(self, where: str, kind: Any, high_water: int = HIGH_WATER) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, high_water)
        self._socket.bind(where)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._unread: deque[zmq.Frame] = deque()  # what has come along with the last message

    def wait(self, timeout_ms: int) -> bool:
        """Return whether there is a message, as soon as there is one."""
        return bool(self._unread) or bool(self._socket.poll(timeout_ms))

    def receive(self, timeout_ms: int) -> tuple[M, Frame] | None:
        """Return the next message and its bulk (b"" without), or None after `timeout_ms`."""
        if timeout_ms and not self.wait(timeout_ms):
            return None
        unread = self._unread
        if not unread:
            try:
                unread.extend(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return None
        message = self._decoder.decode(unread.popleft().buffer)
        return message, unread.popleft().buffer if unread else b""

    def attach(self, loop: asyncio.AbstractEventLoop, handle: Callable[[M, Frame], None]) -> None:
        """Call `handle` from `loop` for each message that comes."""

        def drain() -> None:
            # The descriptor is edge-triggered: what is left unread here is not announced again.
            for _ in range(MAX_DRAINED):
                received = self.receive(0)
                if received is None:
                    return
                handle(*received)
            loop.call_soon(drain)

        loop.add_reader(self._socket.fileno(), drain)
        loop.call_soon(drain)

    def close(self) -> None:
        """Stop listening; unread messages are lost."""
        self._socket.close(linger=0)


class Outbox:
    """The connected end of a link."""

    def __init__(self, where: str, high_water: int = HIGH_WATER) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, high_water)
        self._socket.connect(where)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Message, bulk: Frame | None = None) -> None:
        """Send, waiting while the link is full: the receiver sets the pace."""
        self._socket.send_multipart(self._frames(message, bulk), copy=is_to_copy(bulk))

    def send_all(self, messages: Sequence[tuple[Message, Frame]]) -> None:
        """Send messages with their bulk, as `send` does."""
        frames = [frame for message in messages for frame in self._frames(*message)]
        if frames:
            self._socket.send_multipart(frames)

    def try_send(self, message: Message, bulk: Frame | None = None) -> bool:
        """Send without ever waiting; return False, with nothing sent, where the link is full."""
        frames = self._frames(message, bulk)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=is_to_copy(bulk))
        except zmq.Again:
            return False
        return True

    def _frames(self, message: Message, bulk: Frame | None) -> list[Frame]:
        encoded = self._encoder.encode(message)
        return [encoded] if bulk is None else [encoded, bulk]

    def close(self) -> None:
        """Drop the link and what it has not delivered."""
        self._socket.close(linger=0)


def is_to_copy(bulk: Frame | None) -> bool:
    """Whether bulk is copied: not large `bytes`, which nobody can change while they are sent."""
    return not isinstance(bulk, bytes) or len(bulk) < COPIED_BYTES
