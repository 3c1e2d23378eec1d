"""Answers that stream, by `csrc/http/streams.cpp`: a step's pieces go to sockets in one call."""

import ctypes
import struct
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from headrace.ipc.messages import ResponseFrames
from headrace.native_core import load_core

TURN = 16  # rows that are written in one turn of the event loop
NOTHING_DELIVERED = (1 << 32) - 1
LEFT = struct.Struct("<Q2I")  # as `Left` in the core


class RowsView(ctypes.Structure):
    """As `Rows` in the core."""

    _fields_ = (
        ("ids", ctypes.c_char_p),
        ("lengths", ctypes.c_char_p),
        ("last", ctypes.c_char_p),
        ("num_delivered", ctypes.c_char_p),
        ("data", ctypes.c_char_p),
        ("start", ctypes.c_uint64),
        ("begin", ctypes.c_uint32),
        ("end", ctypes.c_uint32),
    )


class WrittenView(ctypes.Structure):
    """As `Written` in the core."""

    _fields_ = (
        ("start", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("num_left", ctypes.c_uint32),
    )


class Written(NamedTuple):
    """The result of writing some rows of a message."""

    row: int  # that comes next,
    start: int  # and where its data are
    num_bytes: int  # of data, to clients
    # Rows that are written elsewhere: the place of their data, their numbers, and how many bytes of
    # each HTTP chunk have been written.
    left: Iterator[tuple[int, int, int]]


class Streams:
    """Sockets of reading clients, by request.

    The handler of a request opened here writes to its socket only rows that are left.
    """

    def __init__(self) -> None:
        self._core = load_core()
        self._core.headrace_streams_new.restype = ctypes.c_void_p
        self._core.headrace_streams_told.restype = ctypes.c_uint32
        self._core.headrace_streams_num_bytes.restype = ctypes.c_uint64
        self._streams = ctypes.c_void_p(self._core.headrace_streams_new())
        assert self._streams
        weakref.finalize(self, self._core.headrace_streams_free, self._streams)
        self._left = ctypes.create_string_buffer(TURN * LEFT.size)
        self._rows = RowsView()
        self._written = WrittenView()

    def open(self, request: int, fd: int) -> None:
        """Write a request's pieces to a socket as HTTP chunks, from now on; -1: leave them."""
        self._core.headrace_streams_open(self._streams, ctypes.c_uint64(request), fd)

    def close(self, request: int) -> None:
        """Forget a request, if it is here, before its socket is closed."""
        self._core.headrace_streams_close(self._streams, ctypes.c_uint64(request))

    def num_bytes(self, request: int) -> int:
        """Return how many bytes of pieces `write` has sent since the request was opened."""
        sent = self._core.headrace_streams_num_bytes(self._streams, ctypes.c_uint64(request))
        return int(sent)

    def num_delivered(self, request: int) -> dict[int, int]:
        """Return the tokens delivered to a client since the request was opened."""
        counts = ctypes.POINTER(ctypes.c_uint32)()
        count = self._core.headrace_streams_told(
            self._streams, ctypes.c_uint64(request), ctypes.byref(counts)
        )
        return {i: counts[i] for i in range(count) if counts[i] != NOTHING_DELIVERED}

    def write(self, frames: ResponseFrames, data: bytes, row: int, start: int) -> Written:
        """Write some rows of a message, from `row` on, whose data are at `start`."""
        rows, written = self._rows, self._written
        rows.ids, rows.lengths, rows.last = frames.ids, frames.lengths, frames.last
        rows.num_delivered, rows.data = frames.num_delivered or None, data
        rows.start, rows.begin, rows.end = start, row, min(row + TURN, len(frames.last))
        self._core.headrace_streams_write(
            self._streams, ctypes.byref(rows), self._left, ctypes.byref(written)
        )
        left = LEFT.iter_unpack(memoryview(self._left)[: written.num_left * LEFT.size])
        return Written(rows.end, written.start, written.num_bytes, left)
