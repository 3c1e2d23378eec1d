"""A server of a given shape, by default on a GPU, and its results under a load."""

import argparse
import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from headrace.bench.figures import RequestTimes
from headrace.bench.load import LoadRequest, Target, run_load
from support.report import Report, parser
from support.servers import Server, headrace
from support.shapes import SHAPES, shape_folder

NVIDIA = Path("/dev/nvidiactl")  # is there where the driver is
FIRST_TOKEN, END_TOKEN = 1000, 40000  # of prompts: words in any vocabulary that the shapes have

Lengths = Sequence[tuple[int, int]]  # tokens of a prompt, and of its answer


def serving_parser(doc: str | None, rounds: int, shape: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark of a server."""
    options = parser(doc, rounds)
    options.add_argument("--shape", choices=SHAPES, default=shape, help="of the model")
    options.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu shows that the script works"
    )
    return options


def lacks_gpu(report: Report, device: str, what: str) -> bool:
    """Return whether the benchmark lacks a GPU; print a message if so."""
    if device == "cpu" or NVIDIA.exists():
        return False
    report.miss(f"{what}: this machine has no GPU")
    return True


def serve(args: argparse.Namespace, *flags: str) -> Server:
    """Start a server of the shape."""
    folder = str(shape_folder(args.shape))
    return headrace(folder, "--load-format", "dummy", "--device", args.device, *flags)


@dataclass(frozen=True)
class Served:
    """Results of a load. Times are milliseconds, medians over requests."""

    requests_per_s: float
    tokens_per_s: float  # generated
    ttft_ms: float
    tpot_ms: float


def num_load_processes() -> int:
    """Return how many make the load, so that most cores are the server's."""
    return max(1, (os.cpu_count() or 2) // 4)


def body_of(num_prompt: int, num_answer: int, random: np.random.Generator) -> bytes:
    """Return a request with a prompt of random tokens."""
    prompt = random.integers(FIRST_TOKEN, END_TOKEN, num_prompt).tolist()
    options = {"temperature": 0.0, "ignore_eos": True, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    return msgspec.json.encode({"prompt": prompt, "max_tokens": num_answer} | options | usage)


def load(server: Server, lengths: Lengths, every_s: float = 0.0, seed: int = 0) -> Served:
    """Send a request of each of these lengths, at once or one after the other."""
    random = np.random.default_rng(seed)
    requests = [
        LoadRequest(index, index * every_s, body_of(*tokens, random))
        for index, tokens in enumerate(lengths)
    ]
    target = Target(f"{server.url}/v1/completions")
    found = asyncio.run(run_load(target, requests, num_procs=num_load_processes()))
    errors = [record.error for record in found.records if record.error]
    if errors:
        raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
    took_s = max(record.last for record in found.records) - found.start
    times = RequestTimes.of(found.records)
    return Served(
        requests_per_s=len(requests) / took_s,
        tokens_per_s=sum(record.output_tokens for record in found.records) / took_s,
        ttft_ms=median(times.ttft),
        tpot_ms=median(times.tpot),
    )
