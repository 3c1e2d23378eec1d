"""Ranks of a group: threads of a test, or processes, which run one of the programs below."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.collectives.shm_all_reduce import WATCHER, CollectiveFailed, ShmAllReduce

T = TypeVar("T")

DEADLINE_S = 300.0
MAX_COUNT = 300_000  # numbers in a random collective
Array = npt.NDArray[Any]


def ordered_sum(terms: list[Array]) -> Array:
    """Return what numpy makes of the promise: fp32, in the order of the ranks, rounded once."""
    with np.errstate(all="ignore"):
        total = terms[0].astype(np.float32)
        for term in terms[1:]:
            total = total + term.astype(np.float32)
        total[np.isnan(total)] = np.float32(np.nan)
        return total.astype(terms[0].dtype)


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays are equal to the last bit, NaNs and signs of zeros included."""
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def as_threads(
    num_ranks: int, body: Callable[[ShmAllReduce], T], half_bytes: int = 0, isa: str = "best"
) -> list[T]:
    """Run `body` as every rank of a new group at once; return what each returns, by rank."""
    fd = ShmAllReduce.create(num_ranks, half_bytes)

    def be(rank: int) -> T:
        group = ShmAllReduce(fd, rank, num_ranks, isa)
        try:
            return body(group)
        except BaseException:
            group.abort()
            raise
        finally:
            all_ranks_done.wait(DEADLINE_S)
            group.close()

    all_ranks_done = threading.Barrier(num_ranks)
    try:
        with ThreadPoolExecutor(num_ranks) as pool:
            ranks = [pool.submit(be, rank) for rank in range(num_ranks)]
            return [rank.result(DEADLINE_S) for rank in ranks]
    finally:
        os.close(fd)


@contextmanager
def as_processes(
    num_ranks: int, program: str, argument: int, core: int | None = None
) -> Iterator[tuple[list[subprocess.Popen[str]], ShmAllReduce]]:
    """Start a process for every rank, on any core or all on the same one; yield them and a watcher.

    They are gone afterwards.
    """
    fd = ShmAllReduce.create(num_ranks)
    watcher = ShmAllReduce(fd, WATCHER, num_ranks)
    command = [sys.executable, __file__, program, str(fd)]
    pin = [] if core is None else ["taskset", "--cpu-list", str(core)]
    ranks = [
        subprocess.Popen(
            [*pin, *command, str(rank), str(num_ranks), str(argument)],
            stdin=subprocess.PIPE,
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    os.close(fd)
    try:
        yield ranks, watcher
    finally:
        watcher.close()
        for process in ranks:
            process.kill()
            process.communicate()


def random_collectives(group: ShmAllReduce, count: int) -> None:
    """Call collectives of random kinds and sizes; compare all results to the last bit."""
    choices = np.random.default_rng(0)  # the same on every rank
    rows = (group.num_ranks, 2 * MAX_COUNT)
    numbers = np.random.default_rng(1).standard_normal(rows, dtype=np.float32)
    kinds = {np.dtype(t): numbers.astype(t) for t in (np.float32, np.float16)}
    for _ in range(count):
        n = int(np.exp(choices.uniform(0, np.log(MAX_COUNT) if choices.random() < 0.02 else 7)))
        first = int(choices.integers(MAX_COUNT))
        all = kinds[np.dtype(choices.choice(["f4", "f2"]))][:, first : first + n]
        own = all[group.rank].copy()
        kind = choices.choice(["reduce", "gather", "broadcast"], p=[0.8, 0.1, 0.1])
        if kind == "reduce":
            group.all_reduce(own)
            assert same_bits(own, ordered_sum(list(all)))
        elif kind == "gather":
            out = np.empty_like(all, order="C")
            group.all_gather(own, out)
            assert same_bits(out, np.ascontiguousarray(all))
        else:
            root = int(choices.integers(group.num_ranks))
            group.broadcast(own, root)
            assert same_bits(own, all[root])


def endless_sums(group: ShmAllReduce, count: int) -> None:
    """Sum until an error; report after the first sum, and the error at the end."""
    x = np.ones(count, np.float32)
    group.all_reduce(x)
    print("first sum", flush=True)
    try:
        while True:
            group.all_reduce(x)
    except CollectiveFailed as failure:
        print(failure.outcome.name, failure.rank, flush=True)


def one_late_sum(group: ShmAllReduce, late_rank: int) -> None:
    """Sum once; one rank waits for a command first."""
    print("ready", flush=True)
    if group.rank == late_rank:
        sys.stdin.readline()
    group.all_reduce(np.ones(8, np.float32))
    print("sum", flush=True)


def main() -> None:
    """Run one rank: PROGRAM FD RANK NUM_RANKS ARGUMENT."""
    program, fd, rank, num_ranks, argument = sys.argv[1:]
    programs = {f.__name__: f for f in (random_collectives, endless_sums, one_late_sum)}
    programs[program](ShmAllReduce(int(fd), int(rank), int(num_ranks)), int(argument))


if __name__ == "__main__":
    main()
