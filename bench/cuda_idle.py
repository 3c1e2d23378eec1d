"""Measure the idle time of a GPU between two decode steps, with the whole ring under load.

Method: as many streams as run at once, by Qwen2.5-1.5B's shape with random weights, over HTTP. They
        go on until the profile, begun when all of them generate, has ended. A GPU is idle while no
        kernel and no copy runs, from one step's first kernel to the next one's. This includes gaps
        within a step and the profiler's cost.
Run:    python bench/cuda_idle.py --rounds 3
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import httpx

from support.endless import EndlessStreams
from support.report import Quantity, Report
from support.servers import Server
from support.serving import lacks_gpu, serve, serving_parser
from support.trace import Idleness, idleness, read_trace

KEY = "bench"
OPERATOR = {"Authorization": f"Bearer {KEY}"}
RUNNING, STEPS = "headrace:num_requests_running", "headrace:engine_steps_total"
PROMPT_TOKENS = 16
DEADLINE_S = 300
POLL_INTERVAL_S = 0.02
MIN_STEPS = 10  # to be sure of some in the trace: the worker takes note before its next one


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited in vain for {what}")
        time.sleep(POLL_INTERVAL_S)


def profile(server: Server, args: argparse.Namespace, folder: Path) -> Idleness:
    """Return how idle the worker's device is while so many streams generate."""
    before = traces(folder)
    wait_until(lambda: server.metric(RUNNING) == 0, "the streams before these to end")
    with EndlessStreams(server.url, args.streams, PROMPT_TOKENS, args.tokens) as streams:

        def count(name: str) -> float:
            streams.check()
            return server.metric(name) or 0.0

        wait_until(lambda: count(RUNNING) >= args.streams, "all to run")
        with httpx.Client(base_url=server.url, headers=OPERATOR, timeout=DEADLINE_S) as client:
            client.post("/start_profile").raise_for_status()
            enough = count(STEPS) + MIN_STEPS
            time.sleep(args.seconds)
            wait_until(lambda: count(STEPS) >= enough, "steps of the profile")
            client.post("/stop_profile").raise_for_status()
        wait_until(lambda: traces(folder) > before, "the trace")
    (trace,) = traces(folder) - before
    return idleness(read_trace(trace))


def traces(folder: Path) -> set[Path]:
    """Return those that the first worker has written."""
    return set(folder.glob("worker-0-*"))


def main() -> None:
    """Run."""
    options = serving_parser(__doc__, rounds=3, shape="qwen2.5-1.5b")
    options.add_argument("--streams", type=int, default=256)
    options.add_argument("--tokens", type=int, default=2048, help="of a stream; then comes another")
    options.add_argument("--seconds", type=float, default=2.0, help="of the profile, at most")
    args = options.parse_args()
    report = Report("cuda_idle", args)
    if lacks_gpu(report, args.device, "a GPU's idle time"):
        report.finish()
        return
    with tempfile.TemporaryDirectory() as name:
        flags = ("--max-num-seqs", str(args.streams), "--max-num-batched-tokens", "8192")
        admin = ("--admin-api-key", KEY, "--profile-dir", name)
        with serve(args, *flags, *admin) as server:
            found = [profile(server, args, Path(name)) for _ in range(args.rounds)]
    per_step = {"headrace": [median(one.per_step_us) for one in found]}
    report.add(Quantity(f"idle in a step of {args.streams}", "us", per_step))
    shares = {"headrace": [100 * one.share for one in found]}
    report.add(Quantity("idle, of all time", "%", shares))
    report.finish()


if __name__ == "__main__":
    main()
