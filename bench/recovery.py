"""Measure the pause of clients when a process dies, and check every response.

Method: the demo model and 64 clients, each with a stream of 96 tokens followed by the next. One
        kind of process after the other is killed (SIGKILL) 20 times, at random moments. Each time
        all processes serve again and all streams run. A pause is the longest silence of any stream
        between that death and the next, beside the longest without one. The p99 of 20 is the
        longest. Every answer is compared with the one before the first death. At the end no process
        may be left running. The death of a frontend closes its connections; their clients ask
        again, and are not counted.
Run:    python bench/recovery.py --kills 20
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np

from support.report import Quantity, Report, parser
from support.servers import Server, headrace

NUM_CLIENTS = 64
NUM_TOKENS = 96
NUM_PROMPTS = 16
KINDS = ("worker 0", "tokenizer 0", "detokenizer 0", "engine", "frontend 0")
QUIET_S = 5.0  # without deaths, for comparison
DEADLINE_S = 60.0  # until all streams run again
POLL_INTERVAL_S = 0.02
PATH = "/v1/completions"


def body(prompt: int) -> dict[str, Any]:
    """Return one of the requests, half of which are sampled."""
    return {
        **{"prompt": f"Story {prompt}: Once upon a time", "max_tokens": NUM_TOKENS},
        **{"temperature": prompt % 2, "seed": prompt, "ignore_eos": True, "stream": True},
    }


class Clients:
    """Clients, with the text and time of each piece they received."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=url, timeout=DEADLINE_S, limits=httpx.Limits(max_connections=None)
        )
        self.expected: list[str] = []
        self.heard_at = [0.0] * NUM_CLIENTS
        self.silences = [0.0] * NUM_CLIENTS  # the longest of each since `forget`
        self.num_answers = self.num_wrong = self.num_failed = 0
        self.spares_frontends = True  # a connection that ends is a failure

    async def ask(self, prompt: int, client: int) -> str:
        """Return an answer, and note when pieces of it come."""
        text = ""
        async with self._http.stream("POST", PATH, json=body(prompt)) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    text += event["choices"][0]["text"]
                    self._hear(client)
        return text

    def _hear(self, client: int) -> None:
        now = time.perf_counter()
        self.silences[client] = max(self.silences[client], now - self.heard_at[client])
        self.heard_at[client] = now

    def forget(self) -> None:
        """Reset the longest silence."""
        self.silences = [0.0] * NUM_CLIENTS

    async def learn(self) -> None:
        """Record the answers without deaths."""
        self.expected = [await self.ask(prompt, 0) for prompt in range(NUM_PROMPTS)]

    async def run(self, client: int) -> None:
        """Send requests until cancelled."""
        prompts = random.Random(client)
        while True:
            prompt = prompts.randrange(NUM_PROMPTS)
            self.heard_at[client] = time.perf_counter()
            try:
                self.num_wrong += await self.ask(prompt, client) != self.expected[prompt]
                self.num_answers += 1
            except httpx.HTTPError:
                self.num_failed += self.spares_frontends

    async def wait_heard(self, since: float) -> None:
        """Wait until every client has received a piece since a moment."""
        deadline = time.perf_counter() + DEADLINE_S
        while min(self.heard_at) < since:
            if time.perf_counter() > deadline:
                raise SystemExit(f"a stream has been silent for {DEADLINE_S:.0f} s")
            await asyncio.sleep(POLL_INTERVAL_S)


async def wait_well(server: Server) -> float:
    """Wait until all processes serve; return when they did."""
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as http:
        while True:
            try:
                if (await http.get("/health")).status_code == 200:
                    return time.perf_counter()
            except httpx.TransportError:  # it was the frontend
                pass
            await asyncio.sleep(POLL_INTERVAL_S)


async def pause(server: Server, clients: Clients, kind: str, moments: random.Random) -> float:
    """Kill a process; return the longest silence that follows, in seconds."""
    await asyncio.sleep(moments.uniform(0.1, 0.5))
    clients.forget()
    next(p for p in server.processes if f"headrace: {kind}" in p.cmdline()).kill()
    await asyncio.sleep(POLL_INTERVAL_S)  # its death is seen on the board
    await clients.wait_heard(await wait_well(server))
    return max(clients.silences)


@contextmanager
def running(clients: Clients) -> Iterator[None]:
    """Have all clients ask as long as the context lasts."""
    tasks = [asyncio.create_task(clients.run(client)) for client in range(NUM_CLIENTS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def measure(server: Server, num_kills: int, report: Report) -> Clients:
    """Kill every kind of process so many times."""
    clients, moments = Clients(server.url), random.Random(0)
    await clients.learn()
    with running(clients):
        await clients.wait_heard(time.perf_counter())
        clients.forget()
        await asyncio.sleep(QUIET_S)
        silence = max(clients.silences)
        report.add(Quantity("longest silence, no deaths", "s", {"headrace": [silence]}))
        for kind in KINDS:
            clients.spares_frontends = not kind.startswith("frontend")
            pauses = []
            for number in range(num_kills):
                pauses.append(await pause(server, clients, kind, moments))
                print(f"\r{kind}: {number + 1} of {num_kills} deaths ", end="", flush=True)
            print()
            name = kind.split()[0]
            report.add(Quantity(f"pause when the {name} dies", "s", {"headrace": pauses}))
            p99 = {"headrace": [float(np.percentile(pauses, 99, method="inverted_cdf"))]}
            report.add(Quantity(f"pause when the {name} dies, p99", "s", p99))
    return clients


def wait_empty(server: Server) -> None:
    """Wait until nothing is left running, or raise."""
    began = time.perf_counter()
    names = ("num_requests_running", "num_requests_waiting", "replies_open")
    while sum(server.metric(f"headrace:{name}") or 0 for name in names) > 0:
        if time.perf_counter() - began > DEADLINE_S:
            raise SystemExit("requests are left")
        time.sleep(POLL_INTERVAL_S)


def main() -> None:
    """Run and print the report."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--kills", type=int, default=20)
    args = options.parse_args()
    report = Report("recovery", args)
    with headrace("--max-num-seqs", str(NUM_CLIENTS)) as server:
        clients = asyncio.run(measure(server, args.kills, report))
        wait_empty(server)
        pages = [server.metric(f"headrace:kv_pages_{which}") for which in ("free", "total")]
    report.add(Quantity("answers", "", {"headrace": [clients.num_answers]}, True))
    report.add(Quantity("answers that were wrong", "", {"headrace": [clients.num_wrong]}))
    report.add(Quantity("requests that failed", "", {"headrace": [clients.num_failed]}))
    report.finish()
    if clients.num_wrong or clients.num_failed or pages[0] != pages[1]:
        raise SystemExit(f"not all is well: {pages[0]} of {pages[1]} pages are free")


if __name__ == "__main__":
    main()
