"""Limits of control groups, of both versions, nested, and as a container sees them."""

import math
import os
from pathlib import Path

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField
from headrace.supervision.watchdog import MemoryWatchdog
from headrace.system.cgroups import cpu_quota, memory_limits
from headrace.system.machine import memory_limit, usable_cores

GB = 1 << 30
NO_LIMIT = "9223372036854771712\n"
MEMINFO = {"proc/meminfo": f"MemTotal: {64 << 20} kB\n"}
V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"
MOUNTS_1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "32 31 0:29 {group} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {group} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
MOUNTS_2 = "31 23 0:28 {group} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
OWN_1 = "9:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n0::/\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in (MEMINFO | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({f"{V1}/memory.limit_in_bytes": f"{3 * GB}\n"}, 3 * GB),
        ({f"{V1}/memory.limit_in_bytes": NO_LIMIT}, 64 * GB),
        ({f"{V2}/memory.max": f"{3 * GB}\n"}, 3 * GB),
        ({f"{V2}/memory.max": "max\n"}, 64 * GB),
        ({}, 64 * GB),
        (  # a service's own group, below one that has less
            {
                "proc/self/cgroup": "0::/a.slice/b.service\n",
                "proc/self/mountinfo": MOUNTS_2.format(group="/"),
                f"{V2}/a.slice/memory.max": f"{2 * GB}\n",
                f"{V2}/a.slice/b.service/memory.max": f"{3 * GB}\n",
            },
            2 * GB,
        ),
        (  # version 1 on a machine that sees all groups
            {
                "proc/self/cgroup": OWN_1,
                "proc/self/mountinfo": MOUNTS_1.format(group="/"),
                f"{V1}/memory.limit_in_bytes": NO_LIMIT,
                f"{V1}/docker/a/memory.limit_in_bytes": f"{3 * GB}\n",
            },
            3 * GB,
        ),
        (  # and in a container, which sees its own as the outermost
            {
                "proc/self/cgroup": OWN_1,
                "proc/self/mountinfo": MOUNTS_1.format(group="/docker/a"),
                f"{V1}/memory.limit_in_bytes": f"{3 * GB}\n",
            },
            3 * GB,
        ),
        (
            {
                f"{V1}/memory.limit_in_bytes": NO_LIMIT,
                f"{V1}/memory.stat": f"cache 1\nhierarchical_memory_limit {3 * GB}\n",
            },
            3 * GB,
        ),
        ({"proc/self/cgroup": "0::/../b\n", f"{V2}/memory.max": f"{3 * GB}\n"}, 3 * GB),
    ],
)
def test_memory_limit_is_that_of_the_least_group(
    tmp_path: Path, files: dict[str, str], limit: int
) -> None:
    assert memory_limit(machine(tmp_path, files)) == limit


@pytest.mark.parametrize("name", [f"{V1}/memory.limit_in_bytes", f"{V2}/memory.max"])
def test_detokenizer_ceiling_is_below_a_group_of_3_gb(tmp_path: Path, name: str) -> None:
    board = Board.create([Seat("detokenizer", 0)])
    slot = board.slots[0]
    slot.enter(State.READY)
    slot[CommonField.PID] = os.getpid()
    limit = memory_limit(machine(tmp_path, {name: f"{3 * GB}\n"}))
    assert MemoryWatchdog(limit, lambda _: GB, lambda _: 3 * GB // 4).check([slot], 0) == []
    told = [(slot.seat, "has 900 MiB of memory, more than its 768")]
    assert MemoryWatchdog(limit, lambda _: GB, lambda _: 900 << 20).check([slot], 0) == told


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({f"{V2}/cpu.max": "max 100000\n"}, math.inf),
        ({f"{V2}/cpu.max": "150000 100000\n"}, 1.5),
        ({f"{V2}/cpu/cpu.cfs_quota_us": "-1\n", f"{V2}/cpu/cpu.cfs_period_us": "1000\n"}, math.inf),
        ({f"{V2}/cpu/cpu.cfs_quota_us": "50\n", f"{V2}/cpu/cpu.cfs_period_us": "100\n"}, 0.5),
        (
            {
                "proc/self/cgroup": OWN_1,
                "proc/self/mountinfo": MOUNTS_1.format(group="/"),
                f"{V2}/cpu,cpuacct/docker/cpu.cfs_quota_us": "100\n",
                f"{V2}/cpu,cpuacct/docker/cpu.cfs_period_us": "100\n",
                f"{V2}/cpu,cpuacct/docker/a/cpu.cfs_quota_us": "250\n",
                f"{V2}/cpu,cpuacct/docker/a/cpu.cfs_period_us": "100\n",
            },
            1.0,
        ),
    ],
)
def test_cpu_quota_is_in_cores(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    assert cpu_quota(machine(tmp_path, files)) == quota
    num_cores = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == max(1, min(math.ceil(min(quota, 1e6)), num_cores))


def test_memory_of_a_group_is_reported_with_its_limit(tmp_path: Path) -> None:
    files = {f"{V1}/memory.limit_in_bytes": f"{3 * GB}\n", f"{V1}/memory.usage_in_bytes": "7\n"}
    assert list(memory_limits(machine(tmp_path, files))) == [(3 * GB, 7)]
