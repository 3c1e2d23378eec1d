"""Measure the cost of long prompts and of the largest requests to other clients.

Method: 60 clients post at once, each two prompts of 300,000 words (one to /tokenize), too long for
        a context of 8,192 tokens. Then five such bodies come per second. Meanwhile another process
        asks for /health, 2 ms after each answer. Then short chats are streamed one after the other,
        alone and beside prompts of 100,000 tokens, one per second. TTFT is the time to their first
        token. Other pages are asked for while 60 clients have 300,000 words each tokenized; /load
        is one number from the same process as /metrics. No model runs: the mock engine takes no
        time. Last, a model of one layer answers requests with the most log probabilities, one after
        the other, under one API key. Meanwhile a stream and small requests run under another key.
        Beside a huge body of each kind prompts of 75 KB are posted, one after the other.
        All clients share the processor with the server. Words are those of this repository's
        license, at random.
Run:    python bench/burst.py --rounds 2
"""

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.model.tokenizer_json import read_tokenizer_json
from support.blocking import Client
from support.health import PAUSE_S, HealthProbe
from support.largest import KINDS
from support.longest_wait import LongestWait
from support.models import ROOT, demo_model
from support.report import Quantity, Report, parser
from support.servers import headrace
from support.tiny import tiny_folder

CLIENTS = 60
WORDS = 300_000
BODIES = 4  # different ones, posted in turn
TRICKLE_PER_S = 5
TRICKLE_S = 10
CHAT_S = 10
LONG_TOKENS = 100_000
ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "tokenize": "/tokenize"}
ABOUT = ("/v1/models", "/load", "/metrics")  # asked for while bodies are posted
FIGURES = {"median": 0.5, "p99": 0.99, "max": 1.0}
TRICKLE = f"{TRICKLE_PER_S} a second"
LARGEST: dict[str, dict[str, Any]] = {  # the first is refused: it reports ten million
    "60 x 8,000, prompt_logprobs": {"prompt": (60, 8000), "max_tokens": 1, "prompt_logprobs": 20},
    "20 x 8,000, prompt_logprobs": {"prompt": (20, 8000), "max_tokens": 1, "prompt_logprobs": 20},
    "n=60, 3,000 tokens, logprobs": {"prompt": (1, 5), "n": 60, "max_tokens": 3000, "logprobs": 20},
}
HUGE = {  # kinds of `support/largest.py`, each at a share of the largest size
    "15 MB of tool calls": ("calls", 1.0),
    "11 MB of messages": ("many messages", 1.0),
    "30 MB of brackets": ("deep json", 0.9),
    "30 MB of text": ("one text", 1.0),
}
LONG_TEXT = {"prompt": "word " * 15_000, "truncate_prompt_tokens": 100, "max_tokens": 1}
KEYS = ("watched", "large")
ALONE, BESIDE = "alone", "beside long prompts"
MOCK = ("--engine", "mock", "--mock-profile", "zero")


def chats(url: str, seconds: str) -> None:
    """Stream short chats one after the other; print the milliseconds to each one's first token."""
    message = {"role": "user", "content": "Tell me about the river, in a few words."}
    fields = {"messages": [message], "max_tokens": 4, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    client, latencies = Client(url), []
    end = time.perf_counter() + float(seconds)
    while time.perf_counter() < end:
        begun = time.perf_counter()
        client.send("POST", "/v1/chat/completions", body)
        data, first = b"", 0.0
        while not (b"[DONE]" in data[-32:] and is_whole(data)):
            data += client.receive()
            if not first and b'"content":"' in data.replace(b'"content":""', b""):
                first = time.perf_counter()
        assert first, data
        latencies.append((first - begun) * 1e3)
        time.sleep(PAUSE_S)
    print(json.dumps(latencies))


def is_whole(data: bytes) -> bool:
    """Whether a stream that generated its full length has ended."""
    return b"\r\ncontent-length:" in data or data.endswith(b"\r\n0\r\n\r\n")


def post(url: str, path: str, folder: str, number: str, every_s: str) -> None:
    """Post the bodies in `folder` in turn, each from a client of its own; print the seconds."""
    bodies = [file.read_bytes() for file in sorted(Path(folder).iterdir())]
    clients = [Client(url) for _ in range(int(number))]
    statuses: list[int] = []

    def run(index: int, delay_s: float) -> None:
        time.sleep(delay_s)
        clients[index].send("POST", path, bodies[index % len(bodies)])
        statuses.append(clients[index].response())

    begun = time.perf_counter()
    threads = [
        threading.Thread(target=run, args=(i, i * float(every_s))) for i in range(len(clients))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"seconds": time.perf_counter() - begun, "statuses": statuses}))


ROLES = {"chats": chats, "post": post}


@contextmanager
def process(*args: object, script: str = __file__) -> Iterator["subprocess.Popen[str]"]:
    """Run this file, or another, as another process."""
    command = [sys.executable, script, *map(str, args)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as child:  # type: ignore[call-overload]
        try:
            yield child
        finally:
            child.kill()


def ask(*args: object) -> Any:
    """Run this file as another process and return what it prints."""
    with process(*args) as child:
        return json.loads(child.communicate()[0])


def write_bodies(folder: Path) -> None:
    """Write the request bodies: a folder for each route, and one of long prompts that fit."""
    words = (ROOT / "LICENSE").read_text().split()
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(words, k=WORDS))

    for route in (*ROUTES, "long"):
        (folder / route).mkdir()
    for index in range(BODIES):
        texts = [text(), text()]
        messages = [{"role": "user", "content": content} for content in texts]
        fields: dict[str, dict[str, Any]] = {
            "completions": {"prompt": texts},
            "chat": {"messages": messages},
            "tokenize": {"prompt": texts[0]},
            "long": {"prompt": " ".join(draw.choices(words, k=long_words())), "max_tokens": 1},
        }
        for route, body in fields.items():
            (folder / route / f"{index}.json").write_bytes(json.dumps(body).encode())


def long_words() -> int:
    """Return how many words of the license have `LONG_TOKENS` tokens."""
    text = (ROOT / "LICENSE").read_text()
    return LONG_TOKENS * len(text.split()) // count_tokens(text)


def count_tokens(text: str) -> int:
    """Return how many tokens the demo model's tokenizer makes of a text."""
    tokenizer = Tokenizer.from_str(read_tokenizer_json(demo_model()).decode())
    return len(tokenizer.encode(text).ids)


class Result:
    """Three figures of many latencies, for each of several systems."""

    def __init__(self, name: str, systems: list[str]) -> None:
        self.quantities = [
            Quantity(f"{name} {figure}", "ms", {system: [] for system in systems})
            for figure in FIGURES
        ]

    def add(self, system: str, latencies: list[float]) -> None:
        """Add a round."""
        ordered = sorted(latencies)
        for quantity, share in zip(self.quantities, FIGURES.values(), strict=True):
            value = ordered[min(int(share * len(ordered)), len(ordered) - 1)]
            quantity.samples[system].append(value)


def measure_health(folder: Path, health: Result, seconds: Quantity, memory: Quantity) -> None:
    """Post long bodies to a server that refuses them, or only counts their tokens."""
    plans = [*((f"{CLIENTS} at once: {route}", route, CLIENTS, 0.0) for route in ROUTES)]
    plans.append((TRICKLE, "completions", TRICKLE_PER_S * TRICKLE_S, 1 / TRICKLE_PER_S))
    with headrace(str(tiny_folder()), *MOCK, "--max-model-len", "8192") as server:
        for system, route, number, every_s in plans:
            with HealthProbe(server.url) as probe:
                posted = ask("post", server.url, ROUTES[route], folder / route, number, every_s)
            health.add(system, probe.latencies_ms)
            right = 200 if route == "tokenize" else 400
            assert set(posted["statuses"]) == {right}, posted["statuses"]
            seconds.samples[system].append(posted["seconds"])
            titles = {p.cmdline()[0].split()[1]: p for p in server.processes}
            memory.samples[system].append(titles["frontend"].memory_info().rss / 2**20)


def measure_about(folder: Path, about: Result) -> None:
    """Flood tokenizers, and ask the server for pages about itself."""
    path = ROUTES["tokenize"]
    with headrace(str(tiny_folder()), *MOCK, "--max-model-len", "8192") as server:
        for page in ABOUT:
            with HealthProbe(server.url, path=page) as probe:
                ask("post", server.url, path, folder / "tokenize", CLIENTS, 0.0)
            about.add(page, probe.latencies_ms)


def measure_chats(folder: Path, ttft: Result) -> None:
    """Stream chats from a server that takes long prompts."""
    path = ROUTES["completions"]
    with headrace(str(tiny_folder()), *MOCK) as server:
        ask("chats", server.url, 1)
        ask("post", server.url, path, folder / "long", 1, 0)
        ttft.add(ALONE, ask("chats", server.url, CHAT_S))
        with process("post", server.url, path, folder / "long", CHAT_S, 1) as poster:
            ttft.add(BESIDE, ask("chats", server.url, CHAT_S))
            posted = json.loads(poster.communicate()[0])
        assert set(posted["statuses"]) == {200}, posted


def largest_body(fields: dict[str, Any]) -> bytes:
    """Return the body of a largest request, whose prompts are of random tokens."""
    draw = random.Random(0)
    number, length = fields["prompt"]
    prompts = [[draw.randrange(10, 49_000) for _ in range(length)] for _ in range(number)]
    return json.dumps(fields | {"prompt": prompts, "ignore_eos": True}).encode()


def measure_largest(stream: Quantity, small: Quantity, seconds: Quantity) -> None:
    """Send the largest requests beside a stream and small requests of another key."""
    flags = [flag for key in KEYS for flag in ("--api-key", key)]
    with headrace(str(tiny_folder()), *flags) as server:
        for system, fields in LARGEST.items():
            with LongestWait(server.url, KEYS[0]) as others:
                client, begun = Client(server.url, KEYS[1]), time.perf_counter()
                client.send("POST", ROUTES["completions"], largest_body(fields))
                status = client.response()
            is_refused = fields is next(iter(LARGEST.values()))
            assert status == (400 if is_refused else 200), status
            seconds.samples[system].append(time.perf_counter() - begun)
            stream.samples[system].append(others.stream_ms)
            small.samples[system].append(others.small_ms)


def huge_body(kind: str, share: float) -> tuple[str, bytes]:
    """Return the path and the body of a huge request."""
    if kind == "one text":
        return ROUTES["completions"], json.dumps({"prompt": "word " * 6_000_000}).encode()
    return KINDS[kind](random.Random(0), share)


def measure_huge(long: Quantity, seconds: Quantity) -> None:
    """Post prompts of 75 KB beside huge bodies."""
    with headrace(str(tiny_folder()), *MOCK, "--max-model-len", "8192") as server:
        client, body = Client(server.url), json.dumps(LONG_TEXT).encode()
        client.send("POST", ROUTES["completions"], body)  # loads the tokenizer of long bodies
        assert client.response() == 200
        for system, (kind, share) in HUGE.items():
            poster = threading.Thread(target=refused, args=(server.url, *huge_body(kind, share)))
            begun, waits = time.perf_counter(), []
            poster.start()
            while poster.is_alive():
                sent = time.perf_counter()
                client.send("POST", ROUTES["completions"], body)
                assert client.response() == 200
                waits.append((time.perf_counter() - sent) * 1e3)
                time.sleep(PAUSE_S)
            seconds.samples[system].append(time.perf_counter() - begun)
            long.samples[system].append(max(waits))


def refused(url: str, path: str, body: bytes) -> None:
    """Post a body that is too long for the context."""
    client = Client(url)
    client.send("POST", path, body)
    assert client.response() == 400


def main() -> None:
    """Run."""
    args = parser(__doc__, rounds=2).parse_args()
    report = Report("burst", args)
    systems = [*(f"{CLIENTS} at once: {route}" for route in ROUTES), TRICKLE]
    health, ttft = Result("/health", systems), Result("TTFT", [ALONE, BESIDE])
    about = Result("GET", list(ABOUT))
    seconds = Quantity("all answered after", "s", {system: [] for system in systems})
    memory = Quantity("RSS of the frontend", "MiB", {system: [] for system in systems})
    largest = [
        Quantity(f"beside the largest: {name}", unit, {system: [] for system in LARGEST})
        for name, unit in (("a stream's pause", "ms"), ("a small request", "ms"), ("it", "s"))
    ]
    huge = [
        Quantity(f"beside a huge body: {name}", unit, {system: [] for system in HUGE})
        for name, unit in (("a prompt of 75 KB", "ms"), ("it", "s"))
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_bodies(folder)
        for _ in range(args.rounds):
            measure_health(folder, health, seconds, memory)
            measure_about(folder, about)
            measure_chats(folder, ttft)
            measure_largest(*largest)
            measure_huge(*huge)
    quantities = (*health.quantities, *about.quantities, seconds, memory, *ttft.quantities)
    for quantity in (*quantities, *largest, *huge):
        report.add(quantity)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ROLES:
        ROLES[sys.argv[1]](*sys.argv[2:])
    else:
        main()
