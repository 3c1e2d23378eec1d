"""Process statistics read from /proc, from outside the process."""

import os
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PROC = Path("/proc")
UTIME, STIME, RSS = 11, 12, 21  # of `stat_fields`


@dataclass(frozen=True)
class ProcessStats:
    """CPU time since the start, and memory now."""

    cpu_s: float  # of all threads
    busy_s: float  # of the main thread, where a process of the ring does its work
    resident_bytes: int


def vitals_of(pid: int, proc: Path = PROC) -> ProcessStats | None:
    """Return the /proc statistics of a process; None if it is gone."""
    try:
        fields = stat_fields(f"{proc}/{pid}/stat")
        resident = int(fields[RSS]) * PAGE_BYTES
        return ProcessStats(cpu_seconds(fields), main_thread_seconds(pid, proc), resident)
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
        with open(f"{proc}/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * PAGE_BYTES
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
    return cpu_seconds(stat_fields(f"{proc}/{pid}/task/{pid}/stat"))


def stat_fields(path: str) -> list[bytes]:
    """Return what a stat file has behind the name, which may have spaces (proc_pid_stat(5))."""
    with open(path, "rb", buffering=0) as file:
        return file.read().rpartition(b")")[2].split()


def cpu_seconds(fields: list[bytes]) -> float:
    """Return the processor time in a stat file."""
    return (int(fields[UTIME]) + int(fields[STIME])) * TICK_S
