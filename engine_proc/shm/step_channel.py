"""A one-way channel through shared memory: the engine's steps to a worker, results back.

A ring of slots in an inherited memfd. Counters of messages written and read are futex words, so
either side sleeps in the kernel when there is nothing to do. One writer, one reader.

    0    written, u32       64   read, u32
    128  slots: length, u32, then the message
"""

import ctypes
import mmap
import os
from typing import Any, Generic, TypeVar

import msgspec

from headrace.ipc.messages import Message
from headrace.native_core import load_core

M = TypeVar("M")

READ_AT = 64  # a cache line of its own
HEADER_BYTES = 128
LENGTH_BYTES = 4
NUM_SLOTS = 16  # twice as many as there are steps in flight, at most
LOOK_US = 20


class StepChannel(Generic[M]):
    """One end of a channel; which end is a matter of use.

    Args:
        fd: made by `create`.
        kind: the union it carries.
        look_us: how long a reader looks before it sleeps. To be woken takes tens of microseconds;
            looking takes a core that others may need.
    """

    def __init__(self, fd: int, kind: Any, look_us: int = LOOK_US) -> None:
        self.fd = fd
        self._look_us = look_us
        self._map = mmap.mmap(fd, 0)
        self._slot_bytes = (len(self._map) - HEADER_BYTES) // NUM_SLOTS
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._core = load_core()
        self._core.headrace_wait.restype = ctypes.c_uint32
        self._core.headrace_load.restype = ctypes.c_uint32
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._written_at = ctypes.c_void_p(base)
        self._read_at = ctypes.c_void_p(base + READ_AT)
        self._written = self._load(self._written_at)
        self._read = self._load(self._read_at)

    @classmethod
    def create(cls, kind: Any, slot_bytes: int, look_us: int = LOOK_US) -> "StepChannel[M]":
        """Make a channel whose messages take at most `slot_bytes`, encoded."""
        fd = os.memfd_create("headrace-steps", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, HEADER_BYTES + NUM_SLOTS * (slot_bytes + LENGTH_BYTES))
            return cls(fd, kind, look_us)
        except (OSError, ValueError, OverflowError):
            os.close(fd)
            raise

    @property
    def max_bytes(self) -> int:
        """The size of a message, encoded, at most."""
        return self._slot_bytes - LENGTH_BYTES

    @property
    def has_room(self) -> bool:
        """Whether the ring has a slot for the next message."""
        return self._written - self._load(self._read_at) < NUM_SLOTS

    def send(self, message: Message) -> None:
        """Write a message. The ring never fills: at most 8 steps are unanswered at a time."""
        self.send_encoded(self._encoder.encode(message))

    def send_encoded(self, data: bytes | memoryview) -> None:
        """Write a message that is encoded."""
        start = self._start_of(self._written)
        if len(data) > self.max_bytes:
            raise ValueError(f"a message of {len(data)} bytes; slots have {self.max_bytes}")
        assert self.has_room, "the reader is too far behind"
        self._map[start : start + LENGTH_BYTES] = len(data).to_bytes(LENGTH_BYTES, "little")
        self._map[start + LENGTH_BYTES : start + LENGTH_BYTES + len(data)] = data
        self._written = (self._written + 1) % (1 << 32)
        self._core.headrace_publish(self._written_at, ctypes.c_uint32(self._written))

    def receive(self, timeout_s: float, look_us: int | None = None) -> M | None:
        """Return the next message, or None after `timeout_s` or a signal.

        Args:
            look_us: how long to look before sleeping; None is the channel's own.
        """
        data = self.receive_encoded(timeout_s, look_us)
        return None if data is None else self._decoder.decode(data)

    def receive_encoded(self, timeout_s: float, look_us: int | None = None) -> bytes | None:
        """Return the next message as it was sent; otherwise as `receive`."""
        if self._load(self._written_at) == self._read:
            written = self._core.headrace_wait(
                self._written_at,
                ctypes.c_uint32(self._read),
                ctypes.c_int64(self._look_us if look_us is None else look_us),
                ctypes.c_int64(int(timeout_s * 1e6)),
            )
            if written == self._read:
                return None
        start = self._start_of(self._read)
        length = int.from_bytes(self._map[start : start + LENGTH_BYTES], "little")
        data = self._map[start + LENGTH_BYTES : start + LENGTH_BYTES + length]
        self._read = (self._read + 1) % (1 << 32)
        self._core.headrace_publish(self._read_at, ctypes.c_uint32(self._read))
        return data

    def _load(self, address: ctypes.c_void_p) -> int:
        value: int = self._core.headrace_load(address)
        return value

    def _start_of(self, counter: int) -> int:
        return HEADER_BYTES + counter % NUM_SLOTS * self._slot_bytes
