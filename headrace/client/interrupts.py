"""A short traceback when Ctrl-C ends a program that uses Headrace.

Python prints every frame of httpx, asyncio and Headrace, some forty lines. Nothing changes for an
interrupt that the program catches, any other exception, and a program with its own excepthook.
"""

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

MAX_FRAMES = 2  # of three lines each
PACKAGE = Path(__file__).parents[1]  # headrace
LIBRARIES = (sysconfig.get_path("stdlib") + os.sep, str(PACKAGE) + os.sep, "<frozen ")
INSTALLED = ("/site-packages/", "/dist-packages/")


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
    frames = [frame for frame in traceback.extract_tb(trace) if is_of_program(frame.filename)]
    lines = traceback.format_list(frames[-MAX_FRAMES:])
    print(*lines, kind.__name__, sep="", file=sys.stderr, flush=True)


def is_of_program(path: str) -> bool:
    """Whether a file is neither Python's, nor ours, nor of an installed package."""
    return not path.startswith(LIBRARIES) and not any(part in path for part in INSTALLED)
