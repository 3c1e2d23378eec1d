"""What a program that uses Headrace prints when Ctrl-C ends it: where the program was, in short.

Python prints every frame of httpx, asyncio and Headrace, some forty lines. Nothing changes for an
interrupt that the program catches, any other exception, and a program with its own excepthook.
"""

import os
import sys
import sysconfig
import traceback
from types import TracebackType

MAX_FRAMES = 2  # of three lines each
LIBRARIES = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
    os.path.dirname(__file__) + os.sep,
    "<frozen ",
)


def brief_interrupts() -> None:
    """Have an uncaught Ctrl-C print the last frames of the program, and none of libraries."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_uncaught


def print_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an exception that ends the program, as `sys.excepthook`."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    frames = [f for f in traceback.extract_tb(trace) if not f.filename.startswith(LIBRARIES)]
    lines = traceback.format_list(frames[-MAX_FRAMES:])
    print(*lines, kind.__name__, sep="", file=sys.stderr, flush=True)
