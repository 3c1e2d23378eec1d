"""Bytes of a response that wait for its client. What is long is kept as it came, not copied."""

from collections import deque

from headrace.ipc.sockets import Frame

KEPT_BYTES = 64 << 10  # a shorter view is copied: it would keep all of its message


class Unsent:
    """A queue of bytes."""

    def __init__(self) -> None:
        self._frames: deque[memoryview] = deque()
        self._size = 0

    def __len__(self) -> int:
        """How many bytes there are."""
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self._frames)

    def append(self, data: Frame) -> None:
        """Add bytes; they must not change any more."""
        if len(data):
            is_kept = isinstance(data, bytes) or len(data) >= KEPT_BYTES
            self._frames.append(memoryview(data if is_kept else bytes(data)))
            self._size += len(data)

    def take(self, num_bytes: int) -> bytes:
        """Remove so many bytes at most from the beginning, and return them."""
        taken = []
        while num_bytes and self._frames:
            frame = self._frames.popleft()
            if len(frame) > num_bytes:
                self._frames.appendleft(frame[num_bytes:])
                frame = frame[:num_bytes]
            taken.append(frame)
            num_bytes -= len(frame)
            self._size -= len(frame)
        return b"".join(taken)
