"""CPU and memory limits of a container or service, from cgroups v1 and v2.

A group's limit holds for the groups in it, so all from a process's own to the mounted one count.
`root` is where / is, for tests. See cgroups(7) and proc_pid_mountinfo(5).
"""

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOUNT_POINT = "/sys/fs/cgroup"  # of version 2, and the folder of version 1's, where none is listed
HIERARCHICAL = "hierarchical_memory_limit"  # in memory.stat of version 1: the least of all above


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many cores' time this process may use; inf is no limit."""
    quotas = [math.inf]
    for group in groups(root, "cpu"):
        allowed, _, period = read(group / "cpu.max").strip().partition(" ")
        if not allowed:
            allowed = read(group / "cpu.cfs_quota_us").strip()
            period = read(group / "cpu.cfs_period_us").strip()
        if allowed.isdecimal() and period.isdecimal() and int(period) > 0:
            quotas.append(int(allowed) / int(period))
    return min(quotas)


def memory_limits(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Yield each limit of this process's memory in bytes, and how many the group has.

    Version 1 says no limit as a number that no machine has.
    """
    for group in groups(root, "memory"):
        limits = [read(group / name).strip() for name in ("memory.max", "memory.limit_in_bytes")]
        for line in read(group / "memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name == HIERARCHICAL:
                limits.append(value)
        used = read(group / "memory.current") or read(group / "memory.usage_in_bytes")
        for limit in limits:
            if limit.isdecimal():
                yield int(limit), int(used) if used.strip().isdecimal() else 0


def groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that bound this process, its own first, of both versions."""
    own = dict(own_groups(root))
    for version_1, mounted, mount_point in mounts(root, controller):
        path = own.get(controller if version_1 else "", "/")
        # A container may see a mount of its own group, and the path that the machine has for it.
        inner = path.removeprefix(mounted.rstrip("/")) if within(path, mounted) else "/"
        folder = root / mount_point.lstrip("/")
        for group in [inner, *PurePosixPath(inner).parents]:
            yield folder / str(group).lstrip("/")


def own_groups(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the group that this process is in, by controller; "" is version 2."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def mounts(root: Path, controller: str) -> Iterator[tuple[bool, str, str]]:
    """Yield a controller's mounts: whether of version 1, which group is mounted, and where."""
    listed = read(root / "proc/self/mountinfo")
    if not listed:
        yield False, "/", MOUNT_POINT
        yield True, "/", f"{MOUNT_POINT}/{controller}"
    for line in listed.splitlines():
        before, _, after = line.partition(" - ")
        mounted, mount_point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            yield kind == "cgroup", mounted, mount_point


def within(path: str, group: str) -> bool:
    """Whether a group is another, or in it; one above those of a namespace has `..` in its path."""
    return ".." not in path and PurePosixPath(path).is_relative_to(group)


def read(path: Path) -> str:
    """Return a file's text; "" where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
