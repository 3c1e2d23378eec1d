"""Endless load of streams: a stream that ends is followed by another.

Processes of their own read the streams, and disconnect when the context ends.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import numpy as np

from headrace.bench.load import LoadRequest, LoadSender, Target
from headrace.runtime.process import die_with_parent
from support.serving import body_of, num_load_processes

PROGRAM = (sys.executable, "-m", "support.endless")


class EndlessStreams:
    """So many of them, of `num_prompt` random tokens each, from when the context begins."""

    def __init__(self, url: str, num_streams: int, num_prompt: int, num_answer: int) -> None:
        num_procs = min(num_load_processes(), num_streams)
        shares = [len(range(i, num_streams, num_procs)) for i in range(num_procs)]
        self._arguments = [(url, *map(str, (n, num_prompt, num_answer))) for n in shares]
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        for arguments in self._arguments:
            command, where = [*PROGRAM, *arguments], Path(__file__).parents[1]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=where)
            self._processes.append(process)
        return self

    def check(self) -> None:
        """Raise SystemExit if a stream has failed, and with it the others of its process."""
        for process in self._processes:
            if process.poll() is not None:
                assert process.stderr is not None
                raise SystemExit(f"a stream has failed: {process.stderr.read().strip()}")

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


async def keep_streaming(url: str, num_streams: int, num_prompt: int, num_answer: int) -> str:
    """Have so many streams at once until one fails; return why."""
    sender = LoadSender(Target(f"{url}/v1/completions"))

    async def keep_one(seed: int) -> str:
        random, error = np.random.default_rng(seed), ""
        while not error:
            body = body_of(num_prompt, num_answer, random)
            error = (await sender.send(LoadRequest(0, 0.0, body), time.monotonic())).error
        return error

    streams = [asyncio.create_task(keep_one(seed)) for seed in range(num_streams)]
    failed, _ = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
    return failed.pop().result()


if __name__ == "__main__":
    die_with_parent(os.getppid(), signal.SIGKILL)
    sys.exit(asyncio.run(keep_streaming(sys.argv[1], *map(int, sys.argv[2:]))))
