"""Measure the start of a server whose model's file nearly fills the memory.

Method: a file of random weights, the same layer of Qwen3-30B-A3B as often as makes it so large. In
        each round the file is read once by a process that keeps nothing of it, once into new
        memory, then served. Each begins with none of it in the system's cache, and after a pause.
        A host takes the free memory of a virtual machine back within seconds; giving it again costs
        more than reading. Without the pause whatever comes first pays for all. A disk's own cache,
        or a host's, is not ours to drop. Memory is read after one answer, and counts a page that
        processes share once.
Run:    python bench/large_file.py --gib 17 --rounds 2
"""

import argparse
import mmap
import os
import re
import time
from pathlib import Path

import psutil

from support import models
from support.random_gguf import large_file
from support.report import Quantity, Report, parser
from support.servers import Server, headrace
from support.streams import complete

GIB = 2**30
KV_BYTES = GIB // 2
ROOM_GIB = 1.5  # of memory that must be free beside the file
READ_BYTES = 1 << 23  # at a time
FORGOTTEN_BYTES = 1 << 26
RETURN_S = 12  # until a host has free memory back
PROGRESS = re.compile(r"loading weights: \d+ %")


def drop_from_cache(path: Path) -> None:
    """Have the system forget what it has of a file in memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def begin_cold(path: Path) -> None:
    """Have the system forget a file, and the memory that it took."""
    drop_from_cache(path)
    time.sleep(RETURN_S)


def read_s(path: Path) -> float:
    """Return how long it takes to read a file from its first byte to its last."""
    buffer = bytearray(READ_BYTES)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def read_into_memory_s(path: Path) -> float:
    """Return how long it takes to read a file into memory that no process had before."""
    size = path.stat().st_size
    start = time.perf_counter()
    with mmap.mmap(-1, size) as memory, path.open("rb", buffering=0) as file:
        memory.madvise(mmap.MADV_HUGEPAGE)
        with memoryview(memory) as view:
            at = 0
            while num_read := file.readinto(view[at : at + READ_BYTES]):
                at += num_read
                if at // FORGOTTEN_BYTES > (at - num_read) // FORGOTTEN_BYTES:
                    os.posix_fadvise(file.fileno(), 0, at, os.POSIX_FADV_DONTNEED)
        return time.perf_counter() - start


def serve(path: Path) -> Server:
    """Start a server of the file."""
    return headrace(str(path), "--kv-cache-memory-bytes", str(KV_BYTES))


def measure(path: Path) -> dict[tuple[str, str], float]:
    """Read the file, then serve it; return each quantity and unit."""
    found: dict[tuple[str, str], float] = {}
    begin_cold(path)
    found["reading the file once", "s"] = read_s(path)
    begin_cold(path)
    found["reading it into new memory", "s"] = read_into_memory_s(path)
    begin_cold(path)
    with serve(path) as server:
        found["start to healthy", "s"] = server.start_s
        found["start to healthy beyond one read", "s"] = (
            server.start_s - found["reading the file once", "s"]
        )
        found["start to healthy beyond reading it into new memory", "s"] = (
            server.start_s - found["reading it into new memory", "s"]
        )
        found["lines of progress in the log", ""] = len(PROGRESS.findall(server.log()))
        complete(server.url, [models.text_tokens(16)], max_tokens=8)
        found["memory, proportional", "GiB"] = server.memory_bytes()[0] / GIB
        beyond = found["memory, proportional", "GiB"] - (path.stat().st_size + KV_BYTES) / GIB
        found["memory beyond the file and all of the KV cache", "GiB"] = beyond
    drop_from_cache(path)
    return found


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=2)
    options.add_argument("--gib", type=float, default=17, help="size of the file")
    options.add_argument("--type", default="Q4_K", help="of its weights")
    options.add_argument("--keep", action="store_true", help="do not delete the file")
    args: argparse.Namespace = options.parse_args()
    report = Report("large_file", args)
    path = large_file(args.gib, args.type)
    drop_from_cache(path)
    available = psutil.virtual_memory().available / GIB
    needed = args.gib + KV_BYTES / GIB + ROOM_GIB
    if available < needed:
        report.miss(f"a file of {args.gib} GiB: needs {needed:.1f} GiB, {available:.1f} are free")
        rounds = []
    else:
        rounds = [measure(path) for _ in range(args.rounds)]
    for name, unit in rounds[0] if rounds else ():
        samples = [found[name, unit] for found in rounds]
        report.add(Quantity(name, unit, {"headrace": samples}))
    if not args.keep:
        path.unlink()
    report.finish()


if __name__ == "__main__":
    main()
