"""Shares of the cores for replicas of a model. `root` replaces / in tests."""

import os
from collections.abc import Collection
from pathlib import Path


def take_share(index: int, num_shares: int) -> None:
    """Run on one of `num_shares` parts of the cores from now on, as do child processes.

    The system places memory on the NUMA node whose core first writes it.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, share_of(cores, numa_nodes(), index, num_shares))


def share_of(
    cores: Collection[int], nodes: Collection[Collection[int]], index: int, num_shares: int
) -> set[int]:
    """Return one of `num_shares` parts of the cores, node after node; at least one core.

    As many shares as nodes are these nodes, however many cores each has. With fewer cores than
    shares, some shares have the same core.
    """
    usable = usable_nodes(cores, nodes)
    if len(usable) == num_shares and sum(map(len, usable)) == len(cores):
        return usable[index]
    known = [core for node in nodes for core in sorted(node) if core in cores]
    ordered = known + sorted(set(cores) - set(known))
    first = index * len(ordered) // num_shares
    end = (index + 1) * len(ordered) // num_shares
    return set(ordered[first : max(end, first + 1)])


def usable_nodes(cores: Collection[int], nodes: Collection[Collection[int]]) -> list[set[int]]:
    """Return the cores of each node that has some of `cores`; others have memory alone."""
    return [usable for node in nodes if (usable := set(node) & set(cores))]


def num_nodes(root: Path = Path("/")) -> int:
    """Return how many NUMA nodes have cores that this process may use; 1 where it is unknown."""
    return len(usable_nodes(os.sched_getaffinity(0), numa_nodes(root))) or 1


def numa_nodes(root: Path = Path("/")) -> list[list[int]]:
    """Return the cores of each NUMA node, in the order of the nodes; none where it is unknown."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    paths = sorted(folders, key=lambda path: int(path.name.removeprefix("node")))
    return [cores_in((path / "cpulist").read_text()) for path in paths]


def cores_in(text: str) -> list[int]:
    """Return the cores that the kernel writes as "0-3,8,10-11"."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
