"""Tuning of glibc's allocator: when freed memory returns to the kernel.

It returns large freed pieces to the kernel, which clears them at the next use. That takes a third
of the time to prepare an image. But once it has freed one, it takes others of that size from its
heap, whose end they keep. After a burst of long bodies a frontend was twice as large.
"""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # <malloc.h>
KEPT_BYTES = 1 << 30  # of a piece, and of all that is free at the heap's end
LARGE_BYTES = 1 << 18
END_BYTES = (
    2 << 20
)  # free at the heap's end, for pieces that come and go by the quarter of a megabyte


def keep_freed() -> None:
    """Keep freed memory until it is returned explicitly. Only glibc can; elsewhere nothing
    changes."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option in (TRIM_THRESHOLD, MMAP_THRESHOLD):
            libc.mallopt(option, KEPT_BYTES)


def return_large() -> None:
    """Have each large piece given back when it is freed, however many there have been.

    A little of the rest is kept. If the kernel cleared memory for each piece of a body, a frontend
    would spend more time on that than on all its other work.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(TRIM_THRESHOLD, END_BYTES)


def give_back() -> None:
    """Give the kernel all that is free."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
