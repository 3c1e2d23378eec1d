"""Memory that is freed stays with the process while it works.

glibc gives large pieces back to the kernel when they are freed, and the kernel clears them when
they are next wanted: a third of the time that it takes to prepare an image.
"""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # <malloc.h>
KEPT_BYTES = 1 << 30  # of a piece, and of all that is free at the heap's end


def keep_freed() -> None:
    """Keep what is freed, until it is given back. Only glibc can, elsewhere nothing changes."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option in (TRIM_THRESHOLD, MMAP_THRESHOLD):
            libc.mallopt(option, KEPT_BYTES)


def give_back() -> None:
    """Give the kernel all that is free."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
