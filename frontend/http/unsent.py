"""Bytes of a response that wait for its client. A long frame is kept as it is, not copied."""

from collections import deque

from headrace.ipc.sockets import Frame

KEPT_BYTES = 64 << 10  # a shorter view is copied: it would keep all of its message


class Unsent:
    """A queue of bytes.

    Attributes:
        num_bytes: of all frames.
    """

    __slots__ = ("_frames", "num_bytes")

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return self.num_bytes > 0

    def __bytes__(self) -> bytes:
        return b"".join(self._frames)

    def append(self, data: Frame) -> None:
        """Add bytes; they must not change any more."""
        num_bytes = len(data)
        if num_bytes:
            is_kept = num_bytes >= KEPT_BYTES or isinstance(data, bytes)
            self._frames.append(data if is_kept else bytes(data))
            self.num_bytes += num_bytes

    def take(self, num_bytes: int) -> bytes:
        """Remove so many bytes at most from the beginning, and return them."""
        if num_bytes >= self.num_bytes:
            return self.take_all()
        taken = []
        self.num_bytes -= num_bytes
        while num_bytes:
            frame = memoryview(self._frames.popleft())
            if len(frame) > num_bytes:
                self._frames.appendleft(frame[num_bytes:])
                frame = frame[:num_bytes]
            taken.append(frame)
            num_bytes -= len(frame)
        return b"".join(taken)

    def take_all(self) -> bytes:
        """Remove all bytes, and return them."""
        data = b"".join(self._frames)  # a single `bytes` is not copied
        self._frames.clear()
        self.num_bytes = 0
        return data
