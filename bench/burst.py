"""Who notices when long prompts come in?

Method: 60 clients post at once, each two prompts of 300,000 words (one to /tokenize), which are
        too long for a context of 8,192 tokens; then five such bodies come a second. Meanwhile
        another process asks for /health, 2 ms after each answer. Then short chats are streamed one
        after the other, alone and beside prompts of 100,000 tokens that come once a second; TTFT is
        until their first token. No model runs: the mock engine takes no time. All clients share
        the processor with the server. Words are those of this repository's license, at random.
Run:    python bench/burst.py --rounds 2
"""

import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from headrace.tokenizer_json import read_tokenizer_json
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
PAUSE_S = 0.002
ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "tokenize": "/tokenize"}
FIGURES = {"median": 0.5, "p99": 0.99, "max": 1.0}
TRICKLE = f"{TRICKLE_PER_S} a second"
ALONE, BESIDE = "alone", "beside long prompts"
MOCK = ("--engine", "mock", "--mock-profile", "zero")


class Client:
    """One connection that is kept, with blocking calls: nothing costs less."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._host = where.netloc
        self._socket = socket.create_connection((where.hostname, where.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(1 << 20)

    def send(self, method: str, path: str, body: bytes = b"") -> None:
        """Send a request."""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        self._socket.sendall(head.encode() + body if len(body) < 4096 else head.encode())
        if len(body) >= 4096:
            self._socket.sendall(body)

    def receive(self) -> bytes:
        """Return what has come, at least a byte."""
        size = self._socket.recv_into(self._buffer)
        if size == 0:
            raise ConnectionError("the server closed the connection")
        return bytes(memoryview(self._buffer)[:size])

    def response(self) -> int:
        """Read a whole response with a length; return its status."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.receive()
        head, _, body = data.partition(b"\r\n\r\n")
        (length,) = (
            int(line[15:])
            for line in head.lower().split(b"\r\n")
            if line[:15] == b"content-length:"
        )
        left = length - len(body)
        while left > 0:
            left -= self._socket.recv_into(self._buffer)
        return int(head[9:12])


def probe(url: str) -> None:
    """Ask for /health until standard input ends; print each answer's milliseconds."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    client, latencies = Client(url), []
    while not stop.is_set():
        begun = time.perf_counter()
        client.send("GET", "/health")
        assert client.response() == 200
        latencies.append((time.perf_counter() - begun) * 1e3)
        time.sleep(PAUSE_S)
    print(json.dumps(latencies))


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
    """Whether a stream that has said all it has to say has ended."""
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


ROLES = {"probe": probe, "chats": chats, "post": post}


@contextmanager
def process(*args: object) -> Iterator["subprocess.Popen[str]"]:
    """Run this file as another process."""
    command = [sys.executable, __file__, *map(str, args)]
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
    """Write what is posted: a folder for each route, and one of long prompts that fit."""
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
            with process("probe", server.url) as prober:
                posted = ask("post", server.url, ROUTES[route], folder / route, number, every_s)
                health.add(system, json.loads(prober.communicate()[0]))
            right = 200 if route == "tokenize" else 400
            assert set(posted["statuses"]) == {right}, posted["statuses"]
            seconds.samples[system].append(posted["seconds"])
            titles = {p.cmdline()[0].split()[1]: p for p in server.processes}
            memory.samples[system].append(titles["frontend"].memory_info().rss / 2**20)


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


def main() -> None:
    """Run."""
    args = parser(__doc__, rounds=2).parse_args()
    report = Report("burst", args)
    systems = [*(f"{CLIENTS} at once: {route}" for route in ROUTES), TRICKLE]
    health, ttft = Result("/health", systems), Result("TTFT", [ALONE, BESIDE])
    seconds = Quantity("all answered after", "s", {system: [] for system in systems})
    memory = Quantity("RSS of the frontend", "MiB", {system: [] for system in systems})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_bodies(folder)
        for _ in range(args.rounds):
            measure_health(folder, health, seconds, memory)
            measure_chats(folder, ttft)
    for quantity in (*health.quantities, seconds, memory, *ttft.quantities):
        report.add(quantity)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ROLES:
        ROLES[sys.argv[1]](*sys.argv[2:])
    else:
        main()
