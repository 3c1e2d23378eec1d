"""A limit of CPU time for code that is not ours.

What runs longer is interrupted by an exception. Code that cannot be interrupted, within one native
call, ends the process at twice the limit. A signal does it, after a traceback on standard error.
Timers count the CPU time of the process, so a busy machine shortens no limit.
"""

import faulthandler
import signal
from types import FrameType, TracebackType
from typing import ClassVar


class CpuLimitExceeded(BaseException):
    """Code exceeded its CPU time, which the text has. No `except Exception` catches it."""


class CpuLimit:
    """A context in which the main thread may use `seconds` of CPU time."""

    seconds_now: ClassVar[float]  # of the one that is entered

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        faulthandler.register(signal.SIGPROF, all_threads=False, chain=True)
        signal.signal(signal.SIGVTALRM, interrupt)

    def __enter__(self) -> None:
        CpuLimit.seconds_now = self._seconds
        signal.setitimer(signal.ITIMER_PROF, 2 * self._seconds)
        signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds)

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Raise the exception of the limit that has been entered."""
    # It may be raised within __exit__: from here on no timer must be left.
    signal.setitimer(signal.ITIMER_PROF, 0)
    raise CpuLimitExceeded(f"more than {CpuLimit.seconds_now:g} s of CPU time")
