"""A child that goes on as a copy of its parent: modules that both need are imported once.

The kernel copies a page of memory when either writes to it. The parent's other threads do not exist
in the child, so none of them may hold a lock that the child needs.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # by the parent, in its own way
NUM_STANDARD = 3  # descriptors


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold the parent's signals back, so that none reaches a child that has its handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def go_on(run: Callable[[], None], fds: Collection[int], env: dict[str, str]) -> NoReturn:
    """Run a child that has just been forked, to its end, as a fresh interpreter would.

    Args:
        fds: stay open, beside the standard ones.
        env: is set where the environment lacks it.
    """
    status = 1
    try:
        leave_parent(fds)
        for name, value in env.items():
            os.environ.setdefault(name, value)
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else end.code is not None
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def leave_parent(fds: Collection[int]) -> None:
    """Give up what is the parent's: exit functions, descriptors, handlers and mask of signals."""
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in HANDLED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd in map(int, os.listdir("/proc/self/fd")):  # a range may have a billion of them
        if fd >= NUM_STANDARD and fd not in fds:
            with suppress(OSError):  # the list's own is closed
                os.close(fd)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    gc.enable()  # `subprocess` turns it off around a fork
