"""Measure the gain or loss per step when several workers share a model.

Method: the executor of `bench/cpu_step.py` alone, with a thread per core, and as `--ranks`
        processes with an equal part of the threads. All share the same weights. They take turns in
        every round; while one runs, the other sleeps. On one processor all share its memory and its
        cores, so no gain is expected. The figures show the cost of the sums.
Run:    python bench/tensor_parallel.py --ranks 2 --rounds 30
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from cpu_step import PAGE_TOKENS, decode_batch, prefill_batch, spec_of
from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.parallel.peers import Peers
from headrace.engine_proc.worker.parallel.shard import shards
from support.random_weights import random_weights
from support.report import Quantity, Report, parser

BATCHES = {
    "decode B=1 context 64": decode_batch(1, 64),
    "decode B=1 context 1000": decode_batch(1, 1000),
    "decode B=8 context 64": decode_batch(8, 64),
    "decode B=32 context 64": decode_batch(32, 64),
    "prefill 512": prefill_batch(512),
}


def make(args: argparse.Namespace, rank: int | None, fd: int = -1) -> CpuExecutor:
    """Return an executor: a rank's, or one that has the whole model."""
    format = Format(args.format)
    spec = spec_of(format)
    weights = random_weights(format, spec)
    peers, threads = None, args.threads
    if rank is not None:
        threads = max(1, threads // args.ranks)
        group = ShmAllReduce(fd, rank, args.ranks)
        peers = Peers(shards(spec, weights, args.ranks), group)
    return CpuExecutor(
        spec,
        weights,
        num_pages=128,
        page_tokens=PAGE_TOKENS,
        kv_dtype="bfloat16",
        rounds_activations=True,
        threads=threads,
        peers=peers,
    )


def schedule(rounds: int) -> Iterator[tuple[str, Batch]]:
    """Yield the steps of all ranks, in their order; the first round is for warming up."""
    for _ in range(rounds + 1):
        yield from BATCHES.items()


def step_ms(executor: CpuExecutor, batch: Batch) -> float:
    """Return how long a step takes."""
    start = time.perf_counter()
    executor.logits(batch)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=30)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--format", default="BF16")
    options.add_argument("--be", type=int, nargs=2, help=argparse.SUPPRESS)  # a rank, and its group
    args = options.parse_args()
    if args.be is not None:
        executor = make(args, *args.be)
        for _, batch in schedule(args.rounds):
            executor.logits(batch)
        return
    del args.be
    report = Report("tensor_parallel", args)
    fd = ShmAllReduce.create(args.ranks)
    others = [
        subprocess.Popen([sys.executable, *sys.argv, "--be", str(rank), str(fd)], pass_fds=(fd,))
        for rank in range(1, args.ranks)
    ]
    alone, shared = make(args, None), make(args, 0, fd)
    systems = {f"{args.ranks} workers": shared, "1 worker": alone}
    samples: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in systems} for what in BATCHES
    }
    for what, batch in schedule(args.rounds):
        for name, executor in systems.items():
            samples[what][name].append(step_ms(executor, batch))
    for what, by_system in samples.items():
        report.add(Quantity(what, "ms", {name: all[1:] for name, all in by_system.items()}))
    report.finish()
    assert all(other.wait() == 0 for other in others)


if __name__ == "__main__":
    main()
