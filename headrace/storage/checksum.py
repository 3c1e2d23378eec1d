"""Checksums of records and of files' contents."""

import ctypes
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from headrace.native_core import load_core

READ_BYTES = 4 << 20


def checksum(record: bytearray | memoryview) -> int:
    """Return 64 bits that differ wherever one word of a writable record differs."""
    core = load_core()
    core.headrace_checksum.restype = ctypes.c_uint64
    memory = ctypes.c_char.from_buffer(record)
    size = memoryview(record).nbytes
    number: int = core.headrace_checksum(ctypes.byref(memory), ctypes.c_uint64(size))
    return number


def digest_files(paths: Iterable[Path]) -> bytes:
    """Return a digest of the contents of files, whatever their names and times."""
    digest = blake2b(digest_size=16)
    buffer = bytearray(READ_BYTES)
    for path in paths:
        size = 0
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(checksum(memoryview(buffer)[:count]).to_bytes(8, "little"))
                size += count
        digest.update(size.to_bytes(8, "little"))
    return digest.digest()
