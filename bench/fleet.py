"""Measure several engines: throughput of replicas, what routing saves, loads on demand and sleep.

Method: throughput is of mock engines whose steps take as long as an estimate of a GPU's, so the
        ring alone limits it. 64 clients per replica chat at once, each chat followed by the next.
        Then requests come at random, as a Poisson process: short chats of 32 tokens and 64 more, or
        1,024 and 128. Bisection finds the highest rate at which 95 % of them are in time. That is a
        first token within 200 ms, and others within 20 ms each on average, as
        `headrace bench serve --goodput ttft:200 tpot:20` has it.
        Routing is of the demo model: conversations over four replicas, of which each turn adds to
        the one before, all at once. Beside them, four servers take the turns by rotation, as a load
        balancer does that knows no prefixes. Work is counted by the servers. The order alternates.
        Loads are of the demo model under two names, of which one is loaded. The other is asked, and
        the time until its first token is taken. Sleep is of the demo model behind 16 prompts
        of 720 tokens: memory, shared pages counted once, and first tokens, awake, asleep and
        unloaded.
        One engine of its own or elsewhere gets requests one by one. Their first tokens are compared
        in pairs, beside what a bare message takes from process to process. Each round has servers
        of its own.
        Deaths are of a remote engine's machine under 64 streams of the demo model: all of its
        processes are killed, or stopped. The texts are those without a death.
Run:    python bench/fleet.py --rounds 2
"""

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import sub
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

import numpy as np
import psutil

from headrace.bench.arrivals import arrival_times
from headrace.bench.figures import RequestTimes
from headrace.bench.load import LoadRequest, Target, run_load
from headrace.bench.workload import TokenRates, body_of, random_prompts
from headrace.client.client import Client
from support import models
from support.chats import PATH, chat
from support.pings import KINDS, one_way_ms
from support.ports import reserved_port
from support.report import Quantity, Report, parser
from support.servers import POLL_INTERVAL_S, Server, StartFailed, headrace
from support.streams import Stream, complete


@dataclass(frozen=True)
class Workload:
    """Requests that are alike, and of which a replica takes less than `max_rate` a second."""

    num_input: int  # tokens
    num_output: int
    max_rate: float


REPLICAS = (1, 2, 4)
STREAMS = 64  # of each replica
GOALS = {"ttft": 200.0, "tpot": 20.0}  # ms, which
MIN_SHARE = 0.95  # of requests have to keep
NUM_BISECTIONS = 6
NUM_CONVERSATIONS = 32
NUM_TURNS = 8
TURN_TOKENS = 120
FIRST_ID = 1000  # conversations begin with an id of their own, from here on
NUM_WAVES = 4  # of prompts that share a beginning
WAVE = 16  # prompts
PROMPT_TOKENS = 480
SHARED_TOKENS = PROMPT_TOKENS * 26 // 100
NUM_LONE = 500  # requests in a round to each server, one by one,
NUM_WARM = 50  # and those before them that do not count
ADMIN_KEY = "fleet"  # with one, a server has seats for further engines
WORK = "headrace:computed_tokens_total"
ROUTED, ROTATED = "replicas", "rotation"
WORKLOADS = {"short chats": Workload(32, 64, 208.0), "long prompts": Workload(1024, 128, 32.0)}
ROWS = (
    "throughput",
    *WORKLOADS,
    "conversations",
    "alike",
    "choice",
    "remote",
    "loads",
    "sleep",
    "deaths",
)
LOADED, ON_DEMAND, ASLEEP = "loaded", "on demand", "asleep"
KILLED, STILL = "killed", "stands still"
DEATH_TOKENS = 96  # of each stream
MIB = 1 << 20
Turn = list[list[int]]  # a prompt of each conversation
Maker = Callable[[ExitStack], Server]  # starts it, until the stack is left
Load = Callable[[Server, int], float]  # on so many replicas


def conversations() -> Iterator[list[Turn]]:
    """Yield the turns of one round after the other; no two conversations begin alike."""
    tokens = models.text_tokens(NUM_TURNS * TURN_TOKENS)
    ids = itertools.count(FIRST_ID)
    while True:
        firsts = [next(ids) for _ in range(NUM_CONVERSATIONS)]
        yield [
            [[first, *tokens[: turn * TURN_TOKENS - 1]] for first in firsts]
            for turn in range(1, NUM_TURNS + 1)
        ]


def alike() -> Iterator[list[Turn]]:
    """Yield the waves of one round after the other; the prompts of a round begin alike."""
    tokens = models.text_tokens(PROMPT_TOKENS)
    ids = itertools.count(FIRST_ID)
    while True:
        shared = [next(ids), *tokens[: SHARED_TOKENS - 1]]
        yield [
            [[*shared, next(ids), *tokens[SHARED_TOKENS + 1 :]] for _ in range(WAVE)]
            for _ in range(NUM_WAVES)
        ]


def work_of(servers: list[Server]) -> float:
    """Return the tokens that servers have computed so far."""
    return sum(server.metric(WORK) or 0.0 for server in servers)


def talk(servers: list[Server], turns: list[Turn], shift: int) -> tuple[float, float]:
    """Return the tokens computed, and the median milliseconds to a first token.

    Args:
        shift: with which server the rotation begins.
    """
    before, waits = work_of(servers), list[float]()
    for turn_number, prompts in enumerate(turns):
        shares: list[list[list[int]]] = [[] for _ in servers]
        for place, prompt in enumerate(prompts):
            shares[(place + turn_number + shift) % len(servers)].append(prompt)

        def send(server: Server, share: list[list[int]]) -> list[Stream]:
            return complete(server.url, share, max_tokens=1)

        with ThreadPoolExecutor(len(servers)) as pool:
            for answers in pool.map(send, servers, shares):
                waits += [1e3 * (answer.first - answer.sent) for answer in answers]
    return work_of(servers) - before, statistics.median(waits)


def measure_mock(report: Report, rounds: int, quantity: Quantity, measure: Load) -> None:
    """Measure mock engines: one, and replicas of it."""
    flags = ("--engine", "mock", "--mock-profile", "h200-8b", "--max-num-seqs", str(STREAMS))
    with ExitStack() as stack:
        servers = {
            count: stack.enter_context(headrace(*flags, "--data-parallel-size", str(count)))
            for count in REPLICAS
        }
        for _ in range(rounds):
            for count, server in servers.items():
                name = f"{count} replica{'s' if count > 1 else ''}"
                quantity.samples.setdefault(name, []).append(measure(server, count))
    report.add(quantity)


def throughput(seconds: float, server: Server, count: int) -> float:
    """Return the tokens per second of so many replicas that are as busy as can be."""
    return asyncio.run(chat(server.url, count * STREAMS, seconds)).tokens_per_s


def goodput(workload: Workload, seconds: float, server: Server, count: int) -> float:
    """Return the most requests a second that replicas answer in time."""
    low, high = 0.0, count * workload.max_rate
    for _ in range(NUM_BISECTIONS):
        rate = (low + high) / 2
        if share_in_time(server, workload, rate, seconds) >= MIN_SHARE:
            low = rate
        else:
            high = rate
    return low


def share_in_time(server: Server, workload: Workload, rate: float, seconds: float) -> float:
    """Return the share of requests, sent at that rate, that keep all goals."""
    random = np.random.default_rng(0)
    num_requests = round(rate * seconds)
    prompts = random_prompts(
        num_requests,
        input_len=workload.num_input,
        output_len=workload.num_output,
        range_ratio=0.0,
        prefix_len=0,
        rates=TokenRates(),
        random=random,
    )
    due = arrival_times(num_requests, rate, 1.0, random).tolist()
    requests = [
        LoadRequest(i, due[i], body_of(prompt, "chat", None, {"ignore_eos": True}))
        for i, prompt in enumerate(prompts)
    ]
    result = asyncio.run(run_load(Target(server.url + PATH), requests))
    times = RequestTimes.of([record for record in result.records if not record.error])
    share = times.good(GOALS) / num_requests
    print(
        f"{rate:.0f} req/s: {share:.1%} in time, load {max(result.busy):.0%} of a core", flush=True
    )
    return share


def measure_routing(report: Report, rounds: int, name: str, source: Iterator[list[Turn]]) -> None:
    """Measure turns over replicas and over a rotation of servers."""
    num = max(REPLICAS)
    work = Quantity(f"{name}, work", "tokens computed", {ROUTED: [], ROTATED: []})
    wait = Quantity(f"{name}, first token", "ms, median", {ROUTED: [], ROTATED: []})
    with ExitStack() as stack:
        systems = {
            ROUTED: [stack.enter_context(headrace("--data-parallel-size", str(num)))],
            ROTATED: [stack.enter_context(headrace()) for _ in range(num)],
        }
        for number in range(rounds):
            for system, servers in list(systems.items())[:: 1 if number % 2 else -1]:
                tokens, ms = talk(servers, next(source), number)
                work.samples[system].append(tokens)
                wait.samples[system].append(ms)
    report.add(work)
    report.add(wait)


def measure_lone(report: Report, rounds: int, name: str, makers: dict[str, Maker]) -> None:
    """Measure first tokens of requests that come one by one, to two servers in turn.

    What the first server adds is the median of differences, so that the pace of the machine, which
    changes, matters less. Beside them stands what a message takes from process to process. Each
    round has servers of its own, since two of one kind differ by up to 0.1 ms.
    """
    first, second = makers
    wait = Quantity(name, "ms to a first token, median", {system: [] for system in makers})
    added = Quantity(f"{name}, added", "ms, median of pairs", {first: []})
    pace = Quantity(f"{name}, a message", "ms one way, median", {kind: [] for kind in KINDS})
    for number in range(rounds):
        order = list(makers)[:: 1 if number % 2 else -1]
        waits: dict[str, list[float]] = {system: [] for system in makers}
        with ExitStack() as stack:
            servers = {system: makers[system](stack) for system in order}
            for turn in range(NUM_WARM + NUM_LONE):
                for system in order[:: 1 if turn % 2 else -1]:
                    (answer,) = complete(servers[system].url, ["Once upon a time"], max_tokens=1)
                    waits[system].append(1e3 * (answer.first - answer.sent))
        for system, each in waits.items():
            del each[:NUM_WARM]
            wait.samples[system].append(statistics.median(each))
        added.samples[first].append(statistics.median(map(sub, waits[first], waits[second])))
        for kind in KINDS:
            pace.samples[kind].append(one_way_ms(kind))
    for quantity in (wait, added, pace):
        report.add(quantity)


def measure_choice(report: Report, rounds: int) -> None:
    """Measure what routing adds where there is one engine to choose."""

    def one_of_many(stack: ExitStack) -> Server:
        return stack.enter_context(headrace("--engine", "mock", "--admin-api-key", ADMIN_KEY))

    makers = {"one of 16 seats": one_of_many, "no choice": own_engine}
    measure_lone(report, rounds, "one engine", makers)


def own_engine(stack: ExitStack) -> Server:
    """Start a server with a mock engine of its own."""
    return stack.enter_context(headrace("--engine", "mock"))


@contextmanager
def remote_engine(*flags: str) -> Iterator[tuple[psutil.Process, tuple[str, ...]]]:
    """Run an engine that listens; yield its supervisor, and the flags of a server that takes it."""
    with TemporaryDirectory() as folder, reserved_port() as port:
        key_file, where = Path(folder) / "key", f"tcp://127.0.0.1:{port}"
        key = ("--engine-key-file", str(key_file))
        launch = str(Path(sys.executable).parent / "launch_server")
        node = subprocess.Popen([launch, *flags, "--engine-listen", where, *key])
        try:
            while not key_file.exists():
                if node.poll() is not None:
                    raise StartFailed(f"--engine-listen {where} exited with {node.returncode}")
                time.sleep(POLL_INTERVAL_S)
            yield psutil.Process(node.pid), ("--remote-engines", where, *key)
        finally:
            node.terminate()
            node.wait()


def measure_remote(report: Report, rounds: int) -> None:
    """Measure what an engine behind TCP and CURVE adds."""

    def elsewhere(stack: ExitStack) -> Server:
        mock = "--engine", "mock"
        _, flags = stack.enter_context(remote_engine(*mock))
        return stack.enter_context(headrace(*mock, "--data-parallel-size", "0", *flags))

    makers = {"tcp with CURVE": elsewhere, "the machine's own": own_engine}
    measure_lone(report, rounds, "one engine elsewhere", makers)


def lose(node: psutil.Process, way: str) -> list[psutil.Process]:
    """Have a machine end, or stand still; return the processes that do."""
    processes = [node, *node.children(recursive=True)]
    for process in processes:
        (process.kill if way == KILLED else process.suspend)()
    return processes


def resume(processes: list[psutil.Process]) -> None:
    """Have processes that stand still go on."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def measure_deaths(report: Report, rounds: int) -> None:
    """Measure the longest silence of streams, half of which lose their engine's machine."""
    silence = Quantity("machine lost, longest silence", "s", {KILLED: [], STILL: [], "none": []})
    prompts = [[FIRST_ID + i] for i in range(STREAMS)]
    for _ in range(rounds):
        for way in (KILLED, STILL):
            with ExitStack() as stack:
                node, flags = stack.enter_context(remote_engine())
                server = stack.enter_context(headrace(*flags))
                expected = complete(server.url, prompts, DEATH_TOKENS)
                silence.samples["none"].append(max(stream.silence for stream in expected))
                with ThreadPoolExecutor(1) as pool:
                    told = pool.submit(complete, server.url, prompts, DEATH_TOKENS)
                    time.sleep((expected[0].last - expected[0].sent) / 2)
                    stack.callback(resume, lose(node, way))
                    streams = told.result()
                assert [one.text for one in streams] == [one.text for one in expected]
                silence.samples[way].append(max(stream.silence for stream in streams))
    report.add(silence)


def measure_loads(report: Report, rounds: int) -> None:
    """Measure a model's first token that has to load, as two models take turns."""
    wait = Quantity("loads, first token", "ms", {LOADED: [], ON_DEMAND: []})
    names = "one", "two"
    models_of = [{"model": str(models.demo_model()), "served_model_name": name} for name in names]
    with NamedTemporaryFile("w", suffix=".yaml") as file, ExitStack() as stack:
        file.write(json.dumps({"models": models_of}))
        file.flush()
        flags = ("--config", file.name, "--max-loaded-models", "1")
        server = stack.enter_context(headrace(*flags))
        for name in itertools.islice(itertools.cycle(reversed(names)), 2 * rounds):
            for system in (ON_DEMAND, LOADED):
                (answer,) = complete(server.url, ["Once upon"], max_tokens=1, models=[name])
                wait.samples[system].append(1e3 * (answer.first - answer.sent))
    report.add(wait)


def order(client: Client, model: str, action: str, status: str) -> None:
    """Have something become of a model, and wait until it has."""
    getattr(client, action)(model)
    while (found := client.models()[0].status) is None or found.value != status:
        time.sleep(POLL_INTERVAL_S)


def measure_sleep(report: Report, rounds: int) -> None:
    """Measure what sleep gives back, and a first token after it."""
    states = (LOADED, ASLEEP, ON_DEMAND)
    memory = Quantity("sleep, memory", "MiB", {state: [] for state in states})
    wait = Quantity("sleep, first token", "ms", {state: [] for state in states})
    source = conversations()
    with ExitStack() as stack:
        server = stack.enter_context(headrace("--admin-api-key", ADMIN_KEY))
        client = stack.enter_context(Client(server.url, api_key=ADMIN_KEY))
        name = client.models()[0].id
        for _ in range(rounds):
            complete(server.url, next(source)[-1], max_tokens=1)
            for state in states:
                if state == ASLEEP:
                    order(client, name, "sleep", "sleeping")
                elif state == ON_DEMAND:
                    order(client, name, "unload", "unloaded")
                memory.samples[state].append(server.memory_bytes()[0] / MIB)
                (answer,) = complete(server.url, ["Once upon"], max_tokens=1)
                wait.samples[state].append(1e3 * (answer.first - answer.sent))
    report.add(memory)
    report.add(wait)


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=2)
    options.add_argument("--seconds", type=float, default=4, help="of each load of mock engines")
    measured = options.add_argument("--only", nargs="*", choices=ROWS, default=ROWS)
    measured.help = "what to measure"
    args = options.parse_args()
    report = Report("fleet", args)
    if "throughput" in args.only:
        rate = Quantity("mock engines", "tok/s", {}, True)
        measure_mock(report, args.rounds, rate, partial(throughput, args.seconds))
    for name in filter(WORKLOADS.get, args.only):
        rate = Quantity(f"mock engines, {name}", "req/s in time", {}, True)
        measure_mock(report, args.rounds, rate, partial(goodput, WORKLOADS[name], args.seconds))
    if "conversations" in args.only:
        measure_routing(report, args.rounds, "conversations", conversations())
    if "alike" in args.only:
        measure_routing(report, args.rounds, "26 % shared", alike())
    if "choice" in args.only:
        measure_choice(report, args.rounds)
    if "remote" in args.only:
        measure_remote(report, args.rounds)
    if "deaths" in args.only:
        measure_deaths(report, args.rounds)
    if "loads" in args.only:
        measure_loads(report, args.rounds)
    if "sleep" in args.only:
        measure_sleep(report, args.rounds)
    report.finish()


if __name__ == "__main__":
    main()
