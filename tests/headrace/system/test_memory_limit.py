"""What takes too much memory fails alone; what comes after it does not."""

import mmap
import resource

import pytest

from headrace.system.memory_limit import MemoryLimit

MEGABYTE = 1 << 20


def test_more_than_the_limit_is_refused_and_less_is_not() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with MemoryLimit(256 * MEGABYTE):
        bytearray(64 * MEGABYTE)
        with pytest.raises(MemoryError):
            bytearray(1024 * MEGABYTE)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    mmap.mmap(-1, 1024 * MEGABYTE).close()


def test_an_error_leaves_no_limit_behind() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ZeroDivisionError), MemoryLimit(MEGABYTE):
        raise ZeroDivisionError
    assert resource.getrlimit(resource.RLIMIT_AS) == before
