"""A child of a tokenizer process, and the messages between both, each after its length, u32."""

import contextlib
import math
import struct
import subprocess
import sys
import threading
import time
from typing import IO, TypeVar

import msgspec

from headrace.system.procfs import own_bytes

T = TypeVar("T")
LENGTH = struct.Struct("<I")
POLL_INTERVAL_S = 0.1  # between looks at a process that is at a message


def write(sink: IO[bytes], message: msgspec.Struct) -> None:
    """Write a message."""
    data = msgspec.msgpack.encode(message)
    sink.write(LENGTH.pack(len(data)))
    sink.write(data)
    sink.flush()


def read(source: IO[bytes], kind: type[T]) -> T | None:
    """Read a message; return None at the end, be it in the middle of one."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = source.read(length)
    return msgspec.msgpack.decode(data, type=kind) if len(data) == length else None


class ChildPipe:
    """A seat for one child process after the other, which answers one message at a time.

    Args:
        module: what the process runs.
        setup: its first message.
        deadline_s: for an answer, of a process that may hang.
        stderr: as `subprocess.Popen` has it; None is that of this process.
        max_bytes: of memory that a process may have of its own.
    """

    def __init__(
        self,
        module: str,
        setup: msgspec.Struct,
        deadline_s: float,
        stderr: int | None = None,
        max_bytes: float = math.inf,
    ) -> None:
        self.deadline_s = deadline_s
        self.max_bytes = max_bytes
        self.process: subprocess.Popen[bytes] | None = None
        self.is_too_large = False  # the process, which was ended for it at the last message
        self._module = module
        self._setup = setup
        self._stderr = stderr
        self._is_set_up = False

    def start(self) -> "subprocess.Popen[bytes]":
        """Return the process; start one where there is none. It ends with its input.

        Raises:
            OSError: the system is short of processes, say.
        """
        if self.process is None:
            self._is_set_up = False
            self.process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
            )
        return self.process

    def ask(self, message: msgspec.Struct, kind: type[T]) -> T | None:
        """Return the answer to a message; None where the process dies, or is ended.

        It is ended where it hangs, or has too much memory.
        """
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        self.is_too_large, is_over = False, threading.Event()
        threading.Thread(target=self._watch, args=(process, is_over), daemon=True).start()
        answer = None
        with contextlib.suppress(BrokenPipeError):
            if not self._is_set_up:
                write(process.stdin, self._setup)
                self._is_set_up = True
            write(process.stdin, message)
            answer = read(process.stdout, kind)
        is_over.set()
        return answer

    def _watch(self, process: "subprocess.Popen[bytes]", is_over: threading.Event) -> None:
        """End a process that takes too long for an answer, or too much memory."""
        deadline = time.monotonic() + self.deadline_s
        while not is_over.wait(POLL_INTERVAL_S):
            self.is_too_large = (own_bytes(process.pid) or 0) > self.max_bytes
            if self.is_too_large or time.monotonic() >= deadline:
                process.kill()
                return

    def end(self) -> int | None:
        """End the process, and return its exit code."""
        process, self.process = self.process, None
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what was not written yet
            process.stdin.close()
        process.stdout.close()
        return process.wait()
