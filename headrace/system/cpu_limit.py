"""A limit of CPU time for code that is not ours.

What runs longer is interrupted by an exception. Code that cannot be interrupted, within one native
call, ends the process at twice the limit. A signal does it, after a traceback on standard error.
Timers count the CPU time of the process, so a busy machine shortens no limit.
"""

import faulthandler
import signal
import time
from types import FrameType, TracebackType
from typing import ClassVar


class CpuLimitExceeded(BaseException):
    """Code exceeded its CPU time, which the text has. No `except Exception` catches it."""


class CpuLimit:
    """A context in which the main thread may use `seconds` of CPU time."""

    now: ClassVar["CpuLimit"]  # the one that is entered

    def __init__(self, seconds: float, deadly_s: float | None = None) -> None:
        """Limit a piece of code; its process ends after `deadly_s`, by default twice the limit.

        With `deadly_s`, `seconds` are those of the main thread alone.
        """
        self._seconds = seconds
        self._deadly_s = 2 * seconds if deadly_s is None else deadly_s
        self._is_of_thread = deadly_s is not None
        self._until = 0.0  # of the main thread's CPU time
        faulthandler.register(signal.SIGPROF, all_threads=False, chain=True)
        signal.signal(signal.SIGVTALRM, interrupt)

    def __enter__(self) -> None:
        CpuLimit.now = self
        self._until = time.thread_time() + self._seconds if self._is_of_thread else 0.0
        signal.setitimer(signal.ITIMER_PROF, self._deadly_s)
        signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds)

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._until = 0.0  # a signal that is handled within sets no timer again
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)

    def interrupt(self, is_over: bool) -> None:
        """Raise the exception, or wait on where other threads have used the time.

        Callbacks of the garbage collector swallow it, so it is raised again until the end.

        Args:
            is_over: what is limited has come to its end.

        Raises:
            CpuLimitExceeded: the time is over.
        """
        left_s = self._until - time.thread_time()
        if left_s > 0:
            signal.setitimer(signal.ITIMER_VIRTUAL, left_s)
            return
        signal.setitimer(signal.ITIMER_PROF, 0 if is_over else self._deadly_s)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0 if is_over else self._seconds)
        raise CpuLimitExceeded(f"more than {self._seconds:g} s of CPU time")


def interrupt(_signal: int, frame: FrameType | None) -> None:
    """Interrupt what runs within the limit that has been entered."""
    CpuLimit.now.interrupt(frame is not None and frame.f_code is CpuLimit.__exit__.__code__)
