"""Measure a sum over two ranks, beside gloo's, and the time until a dead rank is detected.

Method: two processes on any cores sum zeros in fp32, in place, for 0.1 s at a time. The time of one
        sum is rank 0's mean. Headrace and torch.distributed's gloo take turns within a round. Both
        are called from Python, which is some 3 us of Headrace's figures: the CPU executor calls the
        same function from C++. What a rank does while it waits for the other is counted per 1,000
        sums of 8 KiB. "death" is the time from SIGKILL of rank 1, in the middle of sums, to rank
        0's error. gloo's is not measured: its sockets hang up.
Run:    python bench/all_reduce.py --rounds 9
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine_proc.collectives.shm_all_reduce import CollectiveFailed, ShmAllReduce
from support.report import Quantity, Report, parser

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_RANKS = 2
SIZES = {"8 KiB": 8 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "32 MiB": 32 << 20}
SYSTEMS = ("headrace", "gloo")
SPAN_S = 0.1  # of sums, per figure
TRIAL_SUMS = 3  # before them, which say how many there should be
WAITS = ("looks", "yields", "sleeps")
Sum = Callable[["NDArray[np.float32]"], None]


def gloo(rank: int, meeting_file: str) -> Sum:
    """Return torch.distributed's sum, in place."""
    import torch
    import torch.distributed as distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting_file}", rank=rank, world_size=NUM_RANKS
    )

    def add(x: "NDArray[np.float32]") -> None:
        distributed.all_reduce(torch.from_numpy(x))

    return add


def seconds_per_sum(add: Sum, group: ShmAllReduce, num_bytes: int) -> float:
    """Measure one figure; both ranks take part."""
    x = np.zeros(num_bytes // 4, np.float32)
    count = np.zeros(1, np.int64)
    start = time.perf_counter()
    for _ in range(TRIAL_SUMS):
        add(x)
    count[0] = 1 + SPAN_S * TRIAL_SUMS / (time.perf_counter() - start)
    group.broadcast(count)
    start = time.perf_counter()
    for _ in range(count[0]):
        add(x)
    return (time.perf_counter() - start) / int(count[0])


def be_rank(fd: int, rank: int, rounds: int, meeting_file: str) -> None:
    """Add up; rank 0 prints a line for every figure: system, size, microseconds."""
    group = ShmAllReduce(fd, rank, NUM_RANKS)
    sums: dict[str, Sum] = {"headrace": group.all_reduce, "gloo": gloo(rank, meeting_file)}
    for _ in range(rounds + 1):
        for size, num_bytes in SIZES.items():
            for system in SYSTEMS:
                before = group.waits()
                us = 1e6 * seconds_per_sum(sums[system], group, num_bytes)
                waits = {kind: n - before[kind] for kind, n in group.waits().items()}
                if rank == 0:
                    per_sum = [1000 * waits[kind] / waits["rounds"] for kind in WAITS]
                    print(system, size, us, *per_sum, sep="\t", flush=True)
    sys.stdout.flush()
    os._exit(0)  # gloo has no clean end


def be_killed(fd: int, rank: int) -> None:
    """Add up until that fails; print when that was."""
    group = ShmAllReduce(fd, rank, NUM_RANKS)
    x = np.zeros(2048, np.float32)
    group.all_reduce(x)
    print("adding", flush=True)
    try:
        while True:
            group.all_reduce(x)
    except CollectiveFailed:
        print(time.monotonic(), flush=True)


def start(program: str, *arguments: str) -> list["subprocess.Popen[str]"]:
    """Start this file as every rank of a new group."""
    fd = ShmAllReduce.create(NUM_RANKS)
    command = [sys.executable, __file__, program, str(fd)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *arguments], pass_fds=[fd], stdout=subprocess.PIPE, text=True
        )
        for rank in range(NUM_RANKS)
    ]
    os.close(fd)
    return ranks


def death_ms() -> float:
    """Kill a rank; return the milliseconds until the other detects it."""
    survivor, victim = start("killed")
    assert survivor.stdout is not None and victim.stdout is not None
    assert survivor.stdout.readline() == victim.stdout.readline() == "adding\n"
    killed_at = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    output, _ = survivor.communicate()
    victim.communicate()
    return 1e3 * (float(output) - killed_at)


def main() -> None:
    """Run."""
    args = parser(__doc__, rounds=9).parse_args()
    report = Report("all_reduce", args)
    if len(os.sched_getaffinity(0)) < NUM_RANKS:
        report.miss("sums of two ranks: there is only one core")
        return report.finish()
    sums = {size: Quantity(size, "us per sum", {s: [] for s in SYSTEMS}) for size in SIZES}
    waits = {kind: Quantity(kind, "per 1,000 sums", {"headrace": []}) for kind in WAITS}
    with tempfile.TemporaryDirectory() as folder:
        ranks = start("rank", str(args.rounds), f"{folder}/meeting")
        output, _ = ranks[0].communicate()
        ranks[1].communicate()
    lines = [line.split("\t") for line in output.splitlines()]
    for system, size, us, *per_sum in lines[len(SIZES) * len(SYSTEMS) :]:  # not the first round
        sums[size].samples[system].append(float(us))
        if (system, size) == ("headrace", "8 KiB"):
            for quantity, number in zip(waits.values(), per_sum, strict=True):
                quantity.samples["headrace"].append(float(number))
    death = Quantity("death", "ms", {"headrace": [death_ms() for _ in range(args.rounds)]})
    for quantity in (*sums.values(), *waits.values(), death):
        report.add(quantity)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        be_rank(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    elif sys.argv[1:2] == ["killed"]:
        be_killed(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
