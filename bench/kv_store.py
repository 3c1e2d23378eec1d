"""Measure the next turn of an agent after restarts and kills, with pages kept on disk.

Method: an agent's trace of 10 turns on Qwen2.5-Coder-1.5B in Q4_K_M: 10,000 tokens, and 200 more
        with each turn, answers included. Then comes the next turn: undisturbed, after SIGKILL of
        worker, engine and the whole server, and after a restart. A time to first token
        counts from the moment of the kill, but for restarts from `/health`. "Cold" is the same
        prompt under another salt. A stream beside the fetch tells what other requests notice. Last
        the trace is run with and without a store, each after a start with an empty one.
Run:    python bench/kv_store.py --parts deaths overhead
"""

import json
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from support.real_models import fetch
from support.report import Quantity, Report, parser
from support.servers import Server, headrace

FIRST_TOKENS, TURN_TOKENS, NUM_TURNS, ANSWER_TOKENS = 10_000, 200, 10, 16
LENGTH = "16384"
MAX_TOKEN = 100_000  # above that are special ones
TIMEOUT_S = 300
STREAM_TOKENS = 150
QUIET_TOKENS = 50  # of the stream, before the fetch


class Agent:
    """A conversation: each turn has the one before it, its answer, and some new tokens."""

    def __init__(self, seed: int = 0) -> None:
        self._numbers = random.Random(seed)
        self.tokens = self.some(FIRST_TOKENS)

    def some(self, count: int) -> list[int]:
        """Return new tokens."""
        return [self._numbers.randrange(1000, MAX_TOKEN) for _ in range(count)]

    def turn(self, server: Server, since: float | None = None, salt: str = "") -> float:
        """Return the time to the first token of the next turn, in seconds.

        Args:
            since: when it began, if that was earlier.
        """
        prompt = self.tokens + self.some(TURN_TOKENS - ANSWER_TOKENS)
        began_at = time.perf_counter() if since is None else since
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "cache_salt": salt}
        body |= {"stream": True, "return_token_ids": True, "ignore_eos": True, "temperature": 0}
        first, answer = 0.0, []
        for event in events(server, body):
            first = first or time.perf_counter() - began_at
            answer += event["choices"][0].get("token_ids") or []
        if not salt:
            self.tokens = prompt + answer
        return first


def events(server: Server, body: dict[str, Any]) -> Any:
    """Yield the events of a stream that have tokens; send it again while a process is replaced."""
    while True:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as reply:
            if reply.status_code == 503:
                time.sleep(0.02)
                continue
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith("data: {") and (event := json.loads(line[6:]))["choices"]:
                    yield event
            return


def kill(server: Server, title: str) -> float:
    """Kill a process; return when."""
    next(p for p in server.processes if f"headrace: {title}" in p.cmdline()).kill()
    return time.perf_counter()


def start(model: Path, *args: str) -> Server:
    """Start a server with room for the conversation."""
    return headrace(str(model), "--max-model-len", LENGTH, *args)


def measure_deaths(model: Path, folder: str, report: Report) -> None:
    """Measure the next turn after each kind of death."""
    agent, store = Agent(), ("--kv-store", folder, "--kv-store-disk-bytes", "2G")
    turns: dict[str, list[float]] = {}
    with start(model, *store) as server:
        for _ in range(NUM_TURNS):
            agent.turn(server)
        turns["undisturbed"] = [agent.turn(server)]
        turns["cold"] = [agent.turn(server, salt="cold")]
        for title in ("worker 0", "engine"):
            turns[f"after SIGKILL of the {title}"] = [agent.turn(server, kill(server, title))]
    with start(model, *store) as server:
        turns["after a restart"] = [agent.turn(server)]
        for process in server.processes:
            process.kill()
    with start(model, *store) as server:
        gaps, seconds = measure_beside(server, agent)
        turns["after SIGKILL of the server, beside a stream"] = [seconds]
        hits = server.metric("headrace:kv_store_hits_total")
    for name, samples in turns.items():
        report.add(Quantity(f"next turn {name}", "s", {"headrace": samples}))
    report.add(Quantity("tokens of the last prompt", "", {"headrace": [len(agent.tokens)]}, True))
    report.add(Quantity("pages fetched last", "", {"headrace": [hits or 0]}, True))
    for name, sample in gaps.items():
        report.add(Quantity(f"time between tokens, {name}", "ms", {"headrace": sample}))


def measure_beside(server: Server, agent: Agent) -> tuple[dict[str, list[float]], float]:
    """Return the mean gaps of a stream, before and during a fetch, and the turn's first token."""
    heard: list[float] = []
    is_quiet = threading.Event()

    def listen() -> None:
        body = {"prompt": agent.some(64), "max_tokens": STREAM_TOKENS, "ignore_eos": True}
        for _ in events(server, body | {"stream": True}):
            heard.append(time.perf_counter())
            if len(heard) == QUIET_TOKENS:
                is_quiet.set()

    thread = threading.Thread(target=listen)
    thread.start()
    is_quiet.wait(TIMEOUT_S)
    began_at, before = time.perf_counter(), server.metric("headrace:kv_store_fetch_seconds_total")
    seconds = agent.turn(server)
    spent = (server.metric("headrace:kv_store_fetch_seconds_total") or 0) - (before or 0)
    thread.join()
    times = np.array(heard)
    gaps = np.diff(times) * 1e3
    is_during = (times[1:] > began_at) & (times[1:] < began_at + max(spent, 0.2))
    quiet = gaps[times[1:] < began_at]
    result = {"no fetch": [float(quiet.mean())], "during a fetch": [float(gaps[is_during].mean())]}
    return result | {"longest during a fetch": [float(gaps[is_during].max())]}, seconds


def measure_overhead(model: Path, report: Report) -> None:
    """Run the trace with a store that is never hit, and without."""
    seconds: dict[str, list[float]] = {}
    for name in ("store", "no store"):
        with tempfile.TemporaryDirectory() as folder:
            args = ("--kv-store", folder, "--kv-store-disk-bytes", "2G") if name == "store" else ()
            with start(model, *args) as server:
                agent, began_at = Agent(1), time.perf_counter()
                for _ in range(NUM_TURNS):
                    agent.turn(server)
                seconds[name] = [time.perf_counter() - began_at]
    report.add(Quantity("the trace, a store never hit", "s", seconds))


def main() -> None:
    """Run and print the report."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--parts", nargs="+", default=["deaths", "overhead"])
    args = options.parse_args()
    report = Report("kv_store", args)
    model = fetch("qwen2.5-coder-1.5b")
    if "deaths" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            measure_deaths(model, folder, report)
    if "overhead" in args.parts:
        measure_overhead(model, report)
    report.finish()


if __name__ == "__main__":
    main()
