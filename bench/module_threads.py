"""Measure numbers of threads and wait policies for transformers' modules on a CPU.

Method: layers of a small decoder and an encoder, in processes of torch alone. They run on all
        granted cores and on one fewer. Threads that wait spin, sleep, or spin briefly as those of
        workers do (GOMP_SPINCOUNT). One call of each in turns. A second table has a process
        beside them that keeps a core busy, which is more than the rest of a ring does.
Run:    python bench/module_threads.py --rounds 9
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from headrace.runtime.process import SPIN_COUNT
from headrace.system.machine import usable_cores
from support.report import Quantity, Report, parser

ROWS = {"a decoder's step, 1 row": 1, "an encoder's text, 64 rows": 64}
CALL = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
layers = [torch.nn.TransformerEncoderLayer(576, 9, 1536, batch_first=True) for _ in range(12)]
model, rows = torch.nn.Sequential(*layers).eval(), torch.zeros(1, int(sys.argv[2]), 576)
with torch.inference_mode():
    model(rows)
    print(flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        model(rows)
        print((time.perf_counter() - start) * 1e3, flush=True)
"""
SPIN: dict[str, str] = {}  # as libgomp does by itself


def variants() -> dict[str, tuple[int, dict[str, str]]]:
    """Return thread counts and wait policies, by name."""
    num_cores = usable_cores()
    return {
        "one core left free": (max(1, num_cores - 1), {}),
        "all cores, threads spin": (num_cores, SPIN),
        "all cores, threads sleep": (num_cores, {"OMP_WAIT_POLICY": "PASSIVE"}),
        "all cores, threads spin briefly": (num_cores, SPIN_COUNT),
    }


@contextlib.contextmanager
def busy(num_cores: int) -> Iterator[None]:
    """Keep cores busy meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_cores)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(name: str, num_rows: int, rounds: int) -> Quantity:
    """Return milliseconds per call."""
    samples: dict[str, list[float]] = {variant: [] for variant in variants()}
    with contextlib.ExitStack() as stack:
        processes = {}
        for variant, (num_threads, policy) in variants().items():
            command = [sys.executable, "-c", CALL, str(num_threads), str(num_rows)]
            pipe, env = subprocess.PIPE, {**os.environ, **policy}
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
            processes[variant] = stack.enter_context(process)
            assert process.stdout is not None
            process.stdout.readline()
        for _ in range(rounds):
            for variant, process in processes.items():
                assert process.stdin is not None
                assert process.stdout is not None
                print(file=process.stdin, flush=True)
                samples[variant].append(float(process.stdout.readline()))
    return Quantity(name, "ms", samples)


def main() -> None:
    """Run."""
    args = parser(__doc__, rounds=9).parse_args()
    report = Report("module_threads", args)
    for num_busy in (0, 1):
        with busy(num_busy):
            for name, num_rows in ROWS.items():
                report.add(measure(f"{name}, {num_busy} cores busy", num_rows, args.rounds))
    report.finish()


if __name__ == "__main__":
    main()
