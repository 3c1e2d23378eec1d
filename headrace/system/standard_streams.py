"""Descriptors 0 to 2, which may be closed when a program starts.

Without them the next file that is opened is 0, 1 or 2, and a child gets it as its standard input,
output or error.
"""

import os
import sys


def open_closed() -> None:
    """Open those of 0 to 2 that are closed on /dev/null; to be called before all else."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest that is free: those below are open.
            opened = os.open(os.devnull, os.O_RDONLY if fd == 0 else os.O_WRONLY)
            os.set_inheritable(opened, True)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
