"""What the kernel says of a process. Nothing is measured in it."""

import os
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessStats:
    """Processor time since the start, and memory now."""

    cpu_s: float  # of all threads
    busy_s: float  # of the main thread, where a process of the ring does its work
    resident_bytes: int


def vitals_of(pid: int, proc: Path = PROC) -> ProcessStats | None:
    """Return what /proc says of a process; None where there is none."""
    try:
        cpu_s = cpu_seconds(proc / str(pid) / "stat")
        return ProcessStats(cpu_s, main_thread_seconds(pid, proc), resident_bytes(pid, proc))
    except OSError:
        return None


def busy_seconds(pid: int, proc: Path = PROC) -> float | None:
    """Return the processor time of a process's main thread; None where there is none."""
    try:
        return main_thread_seconds(pid, proc)
    except OSError:
        return None


def resident_bytes(pid: int, proc: Path = PROC) -> int:
    """Return what a process has in memory, files included; 0 where there is none."""
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def own_bytes(pid: int, proc: Path = PROC) -> int | None:
    """Return what a process has of memory that is no file's; None where there is none.

    Weights that are mapped from a file are the kernel's to keep or to drop.
    """
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    parts = [fields[name].split() for name in ("RssAnon", "RssShmem") if name in fields]
    return sum(int(kilobytes) << 10 for kilobytes, _ in parts)


def main_thread_seconds(pid: int, proc: Path) -> float:
    """Return the processor time of the thread that does the work."""
    return cpu_seconds(proc / str(pid) / "task" / str(pid) / "stat")


def cpu_seconds(stat: Path) -> float:
    """Return utime and stime of a stat file (proc_pid_stat(5))."""
    after_name = stat.read_text().rpartition(")")[2].split()  # a name may have spaces
    return (int(after_name[11]) + int(after_name[12])) * TICK_S
