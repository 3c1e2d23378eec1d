"""A one-way link for hidden states through shared memory: from a pipeline stage to the next.

A ring of raw frames in an inherited memfd. A frame has a row of fp32 numbers for each token of a
step. A stage computes straight into a frame, and the next one reads it there. One writer, one
reader. Counters of frames written and read are futex words, as in `step_channel.py`.

    0    written, u32       64   read, u32
    128  frames: rows, i32, padded to 64 bytes, then the rows; -1 rows: the step has failed
"""

import ctypes
import mmap
import os
import struct

import numpy as np
import numpy.typing as npt

from headrace.native_core import load_core

Rows = npt.NDArray[np.float32]

READ_AT = 64  # a cache line of its own
FRAMES_AT = 128
HEAD_BYTES = 64
NUM_ROWS = struct.Struct("<i")
NUMBER_BYTES = 4  # f32
FAILED = -1
LOOK_US = 200  # before a reader sleeps


class HiddenLink:
    """One end of a link; which end is a matter of use.

    Args:
        fd: made by `create`. Both ends give it the same size.
        num_frames: that are not read at a time, at most: as many as steps are in flight.
        max_rows: of a frame.
        row_size: numbers of each row.
    """

    def __init__(self, fd: int, num_frames: int, max_rows: int, row_size: int) -> None:
        self._num_frames, self._max_rows = num_frames, max_rows
        self._wrap = (1 << 32) // num_frames * num_frames  # of counters: frames stay in turn
        self._row_size = row_size
        row_bytes = max_rows * row_size * NUMBER_BYTES
        self._frame_bytes = HEAD_BYTES + -(-row_bytes // HEAD_BYTES) * HEAD_BYTES
        num_bytes = FRAMES_AT + num_frames * self._frame_bytes
        os.ftruncate(fd, num_bytes)
        self._map = mmap.mmap(fd, num_bytes)
        self._core = load_core()
        self._core.headrace_wait.restype = ctypes.c_uint32
        self._core.headrace_load.restype = ctypes.c_uint32
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._written_at = ctypes.c_void_p(base)
        self._read_at = ctypes.c_void_p(base + READ_AT)
        self._written = self._load(self._written_at)
        self._read = self._load(self._read_at)

    @staticmethod
    def create() -> int:
        """Make a link and return its descriptor. It takes only the memory that is written."""
        return os.memfd_create("headrace-hidden", os.MFD_CLOEXEC)

    def room(self, num_rows: int) -> Rows:
        """Return the rows of the next frame, to be filled before it is sent."""
        assert num_rows <= self._max_rows, f"{num_rows} rows, where frames have {self._max_rows}"
        assert self.has_room, "the next stage is too far behind"
        return self._rows(self._written, num_rows)

    def send(self, num_rows: int = FAILED) -> None:
        """Send the next frame with so many rows, or that its step has failed."""
        assert self.has_room, "the next stage is too far behind"
        NUM_ROWS.pack_into(self._map, self._start_of(self._written), num_rows)
        self._written = (self._written + 1) % self._wrap
        self._core.headrace_publish(self._written_at, ctypes.c_uint32(self._written))

    @property
    def has_room(self) -> bool:
        """Whether the next frame has room."""
        unread = self._written - self._load(self._read_at)
        return unread % self._wrap < self._num_frames

    def wait(self, timeout_s: float) -> bool:
        """Return whether a frame is there, after `timeout_s` or a signal at most."""
        written = self._core.headrace_wait(
            self._written_at,
            ctypes.c_uint32(self._read),
            ctypes.c_int64(LOOK_US),
            ctypes.c_int64(int(timeout_s * 1e6)),
        )
        return bool(written != self._read)

    def rows(self) -> Rows | None:
        """Return the rows of the oldest frame, there until `release`; None: its step has failed."""
        (num_rows,) = NUM_ROWS.unpack_from(self._map, self._start_of(self._read))
        return None if num_rows == FAILED else self._rows(self._read, num_rows)

    def release(self) -> None:
        """Give the oldest frame back to the writer."""
        self._read = (self._read + 1) % self._wrap
        self._core.headrace_publish(self._read_at, ctypes.c_uint32(self._read))

    def _rows(self, counter: int, num_rows: int) -> Rows:
        count, start = num_rows * self._row_size, self._start_of(counter) + HEAD_BYTES
        return np.frombuffer(self._map, np.float32, count, start).reshape(num_rows, -1)

    def _start_of(self, counter: int) -> int:
        return FRAMES_AT + counter % self._num_frames * self._frame_bytes

    def _load(self, address: ctypes.c_void_p) -> int:
        value: int = self._core.headrace_load(address)
        return value
