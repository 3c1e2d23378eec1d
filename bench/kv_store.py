"""Measure the next turn of an agent after restarts and kills, with pages kept on disk.

Method: an agent's trace of 10 turns on Qwen2.5-Coder-1.5B in Q4_K_M: 10,000 tokens, and 200 more
        with each turn, answers included. Then comes the next turn: undisturbed, after SIGKILL of
        worker, engine and the whole server, and after a restart. A time to first token
        counts from the moment of the kill, but for restarts from `/health`. "Cold" is the same
        prompt under another salt. A stream beside the fetch tells what other requests notice. Its
        tokens count from the first to the last bytes that the store's process reads. So none waits
        for the prompt's own tail to be computed. Tokenizers have loaded all before. Then the trace
        is run with and without a store, each after a start with an empty one. Last the next turn
        after a restart stands beside llama.cpp's. That reads the saved state of the same tokens,
        in a process without a server, once its model is loaded.
Run:    python bench/kv_store.py --parts deaths overhead llama --llama-python PYTHON
        A trace of a few seconds: --model MODEL.gguf --first-tokens 1000
"""

import json
import os
import random
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from support.llama_process import LlamaProcess
from support.real_models import fetch
from support.report import Quantity, Report, parser, peer_version
from support.servers import Server, headrace

FIRST_TOKENS = 10_000  # by default
TURN_TOKENS, NUM_TURNS, ANSWER_TOKENS = 200, 10, 16
LENGTH = "16384"
MAX_TOKEN = 100_000  # above that are special ones
TIMEOUT_S = 300
STREAM_TOKENS = 350
LONG_WORDS = 20_000  # a body for the tokenizer of long ones
IDLE_LOOK_S, IDLE_SHARE = 2.0, 0.1  # of a core, when tokenizers have loaded
QUIET_TOKENS = 50  # of the stream, before the fetch
PIECE_BYTES = 100_000  # less than a page: other reads are smaller
LOOK_S = 0.01  # between looks at what the store reads


class Agent:
    """A conversation: each turn has the one before it, its answer, and some new tokens."""

    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        self._numbers = random.Random(seed)
        self.tokens = self.some(num_tokens)

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


class StoreWatch:
    """When the store's process reads: pages to fetch, as no other ones are idle meanwhile."""

    def __init__(self, server: Server) -> None:
        title = "headrace: kv_store 0"
        self._process = next(p for p in server.processes if title in p.cmdline())
        self._is_over = threading.Event()
        self._reads: list[float] = []
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "StoreWatch":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        before = self._num_bytes()
        while not self._is_over.wait(LOOK_S):
            now = self._num_bytes()
            if now - before >= PIECE_BYTES:
                self._reads.append(time.perf_counter())
            before = now

    def _num_bytes(self) -> int:
        count: int = self._process.io_counters().read_chars
        return count

    def is_fetching(self, times: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Return which moments are between the first read and the last."""
        return (times >= self._reads[0] - LOOK_S) & (times <= self._reads[-1])


def measure_deaths(model: Path, num_tokens: int, folder: str, report: Report) -> None:
    """Measure the next turn after each kind of death."""
    agent, store = Agent(num_tokens), ("--kv-store", folder, "--kv-store-disk-bytes", "2G")
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


def wait_until_idle(server: Server) -> None:
    """Wait until a new server has loaded what it loads beside its first answers."""
    used, before = server.cpu_s(), 0.0
    while used - before > IDLE_SHARE * IDLE_LOOK_S:
        time.sleep(IDLE_LOOK_S)
        used, before = server.cpu_s(), used


def measure_beside(server: Server, agent: Agent) -> tuple[dict[str, list[float]], float]:
    """Return the mean gaps of a stream, before and during a fetch, and the turn's first token."""
    long_body = {"prompt": "word " * LONG_WORDS}
    httpx.post(f"{server.url}/tokenize", json=long_body, timeout=TIMEOUT_S).raise_for_status()
    wait_until_idle(server)
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
    began_at = time.perf_counter()
    with StoreWatch(server) as watch:
        seconds = agent.turn(server)
    thread.join()
    times = np.array(heard)
    gaps = np.diff(times) * 1e3
    quiet = gaps[times[1:] < began_at][1:]  # the first step after a start is longer
    during = gaps[watch.is_fetching(times[1:])]
    result = {"no fetch": [float(quiet.mean())], "during a fetch": [float(during.mean())]}
    return result | {"longest during a fetch": [float(during.max())]}, seconds


def measure_overhead(model: Path, num_tokens: int, report: Report) -> None:
    """Run the trace with a store that is never hit, and without."""
    seconds: dict[str, list[float]] = {}
    for name in ("store", "no store"):
        with tempfile.TemporaryDirectory() as folder:
            args = ("--kv-store", folder, "--kv-store-disk-bytes", "2G") if name == "store" else ()
            with start(model, *args) as server:
                agent, began_at = Agent(num_tokens, 1), time.perf_counter()
                for _ in range(NUM_TURNS):
                    agent.turn(server)
                seconds[name] = [time.perf_counter() - began_at]
    report.add(Quantity("the trace, a store never hit", "s", seconds))


def measure_llama(model: Path, num_tokens: int, python: str, report: Report) -> None:
    """Measure the next turn after a restart, beside llama.cpp's with a saved state."""
    agent, threads = Agent(num_tokens + TURN_TOKENS * NUM_TURNS, 2), len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        store = ("--kv-store", folder, "--kv-store-disk-bytes", "2G")
        with start(model, *store) as server:
            agent.turn(server)
        known, state = agent.tokens, f"{folder}/state"
        with start(model, *store) as server:
            ours = [agent.turn(server)]
        with closing(LlamaProcess(python, model, threads)) as theirs:
            theirs.ask({"save": state, "prompt": known})
        with closing(LlamaProcess(python, model, threads)) as theirs:
            theirs.ask({"prefill": known[:1]})  # loads the model
            seconds, _ = theirs.ask({"restore": state, "prompt": agent.tokens[:-ANSWER_TOKENS]})
    samples = {"headrace": ours, "llama.cpp": [seconds]}
    report.add(Quantity("next turn after a restart, pages or state saved", "s", samples))


def main() -> None:
    """Run and print the report."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--parts", nargs="+", default=["deaths", "overhead", "llama"])
    options.add_argument("--llama-python", default=os.environ.get("LLAMA_PYTHON"))
    options.add_argument("--model", help="by default Qwen2.5-Coder-1.5B")
    options.add_argument("--first-tokens", type=int, default=FIRST_TOKENS)
    args = options.parse_args()
    report = Report("kv_store", args)
    version = peer_version(args.llama_python, "llama-cpp-python")
    model = Path(args.model) if args.model else fetch("qwen2.5-coder-1.5b")
    if "deaths" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            measure_deaths(model, args.first_tokens, folder, report)
    if "overhead" in args.parts:
        measure_overhead(model, args.first_tokens, report)
    if "llama" in args.parts and version is None:
        report.miss("llama.cpp: --llama-python or LLAMA_PYTHON names no Python that has it")
    elif "llama" in args.parts:
        report.versions["llama-cpp-python"] = version
        measure_llama(model, args.first_tokens, args.llama_python, report)
    report.finish()


if __name__ == "__main__":
    main()
