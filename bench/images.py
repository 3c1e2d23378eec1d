"""Measure the effect of hundreds of simultaneous images on health checks and other chats.

Method: 300 clients post a chat at once, each with a scanned page of its own, a JPEG of 1.2 or 2.5
        MB. One server has one image process, the other two. Meanwhile another process asks for
        /health, 2 ms after each answer. Clients on a machine of their own would not take the
        server's cores, so here they get long time slices that others interrupt. The images per
        second are those of 100 clients without other load. Then short chats are streamed one after
        the other, alone and beside the same 300 chats; TTFT is until their first token. Last, one
        after the other, come images that are to be refused: truncated, moving, bombs, SVG,
        elsewhere. The images are prepared as for Gemma 3 (896 x 896 pixels). No model
        runs: the mock engine takes no time. All clients share the processor with the server.
        With --family a server of each family, with one image process, prepares images as its
        published processor does: 12 clients post pages at once. One page at a time is the time
        from its request to its token, in which no tower runs.
Run:    python bench/images.py --rounds 2
        python bench/images.py --rounds 1 --family smolvlm qwen3_vl --save families --add
"""

import base64
import io
import json
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from burst import ALONE, Result, process
from burst import ask as ask_burst
from headrace.bench.pages import page_file
from headrace.system.cpu_scheduling import take_long_turns
from support.blocking import Client
from support.health import HealthProbe
from support.report import Quantity, Report, parser
from support.servers import Server, headrace
from support.vision import FAMILIES, vision_folder

CLIENTS = 300
RATE_CLIENTS = 100  # where only the rate is wanted
DPIS = (200, 300)
PIECE_BYTES = 64 << 10  # sent at once: no other process runs before the kernel has taken them
PAGES = 8  # different ones; what comes after a JPEG's end makes each image another
PROCESSES = (1, 2)
CHAT_S = 5
EMPTY_S = 30
FAMILY_CLIENTS = 12
FAMILY_CHAT_S = 2
PAGES_ALONE = 3
BESIDE = "beside images"
REFUSAL = "400 for a bad image, max"
PATH = "/v1/chat/completions"
MOCK = ("--engine", "mock", "--mock-profile", "zero")
BEFORE = b'{"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": '
BEFORE += b'"What is written here?"}, {"type": "image_url", "image_url": {"url": '
BEFORE += b'"data:image/jpeg;base64,'
AFTER = b'"}}]}]}'


def post(url: str, folder: str, salt: str, number: str) -> None:
    """Post a chat from each client, with an image of its own; print the seconds and statuses."""
    take_long_turns()
    pages = [file.read_bytes() for file in sorted(Path(folder).iterdir())]
    pages = [base64.b64encode(page + bytes(-len(page) % 3)) for page in pages]
    pieces = [
        [page[i : i + PIECE_BYTES] for i in range(0, len(page), PIECE_BYTES)] for page in pages
    ]
    clients = [Client(url) for _ in range(int(number))]
    statuses: list[int] = []

    def run(index: int) -> None:
        own = base64.b64encode(f"{salt:>12.12}{index:>12}".encode())
        clients[index].send_pieces("POST", PATH, [BEFORE, *pieces[index % PAGES], own, AFTER])
        statuses.append(clients[index].response())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(clients))]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == len(clients), "requests were lost"
    print(json.dumps({"seconds": time.perf_counter() - begun, "statuses": statuses}))


def posting(server: Server, pages: str, salt: str, number: int = CLIENTS) -> Any:
    """Post chats from another process."""
    return process("post", server.url, pages, salt, number, script=__file__)


def write_pages(folder: Path) -> None:
    """Write the pages that are posted."""
    random = np.random.default_rng(0)
    for index in range(PAGES):
        (folder / f"{index}.jpg").write_bytes(page_file(DPIS[index % 2], random))


def outcome(child: Any) -> float:
    """Return how many clients of a process have had their answers, a second."""
    posted = json.loads(child.communicate()[0])
    assert set(posted["statuses"]) == {200}, posted["statuses"]
    return len(posted["statuses"]) / float(posted["seconds"])


def bad_urls() -> list[str]:
    """Return images that cannot be taken."""
    page, moving = io.BytesIO(), io.BytesIO()
    picture = Image.effect_noise((400, 300), 60)
    picture.save(page, "PNG")
    picture.save(moving, "GIF", save_all=True, append_images=[picture.rotate(90)])
    png = page.getvalue()
    files = [
        ("png", png[:-5000]),
        ("png", resized(png, 1, 100_000)),
        ("png", resized(png, 30_000, 30_000)),
        ("jpeg", png),
        ("gif", moving.getvalue()),
        ("svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
    ]
    urls = [f"data:image/{kind};base64,{base64.b64encode(data).decode()}" for kind, data in files]
    urls += ["data:image/png;base64,!!!", "http://169.254.169.254/latest", "http://localhost/x.png"]
    return urls


def resized(png: bytes, width: int, height: int) -> bytes:
    """Return a PNG whose header claims another size."""
    return png[:16] + width.to_bytes(4, "big") + height.to_bytes(4, "big") + png[24:]


def refusals_ms(server: Server) -> list[float]:
    """Return the time until each invalid image is refused, ms."""
    client, latencies = Client(server.url), []
    for url in bad_urls():
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
        begun = time.perf_counter()
        client.send("POST", PATH, body)
        assert client.response() == 400, url[:60]
        latencies.append((time.perf_counter() - begun) * 1e3)
    return latencies


def wait_until_empty(server: Server) -> None:
    """Wait until the engine is done with all images."""
    deadline = time.monotonic() + EMPTY_S
    while server.metric("headrace:image_bytes_sent") > 0:
        assert time.monotonic() < deadline, "images are left in the arena"


class Results:
    """Measurements, by number of image processes."""

    def __init__(self) -> None:
        systems = [f"{n} process{'es' * (n > 1)}" for n in PROCESSES]
        self.names = dict(zip(PROCESSES, systems, strict=True))
        self.health = Result("/health", systems)
        self.rate = Quantity("images", "1/s", {s: [] for s in systems}, higher_is_better=True)
        self.memory = Quantity("RSS of a process that prepares", "MiB", {s: [] for s in systems})
        self.ttft = Result("TTFT", [ALONE, BESIDE])
        self.refusal = Quantity(REFUSAL, "ms", {s: [] for s in systems})

    def measure(self, folder: Path, num_procs: int, salt: str) -> None:
        """Measure one round with one server."""
        system, pages = self.names[num_procs], str(folder)
        flags = (*MOCK, "--preprocess-procs", str(num_procs), "--max-model-len", "8192")
        with headrace(str(vision_folder()), *flags) as server:
            ask_burst("chats", server.url, 1)
            with HealthProbe(server.url) as probe, posting(server, pages, salt) as poster:
                outcome(poster)
            self.health.add(system, probe.latencies_ms)
            with posting(server, pages, salt + "r", RATE_CLIENTS) as poster:
                self.rate.samples[system].append(outcome(poster))
            titles = {p.cmdline()[0]: p for p in server.processes}
            mine = titles["headrace: tokenizer 2"].memory_info()
            self.memory.samples[system].append((mine.rss - mine.shared) / 2**20)
            wait_until_empty(server)
            self.refusal.samples[system].append(max(refusals_ms(server)))
            if num_procs == 1:
                self.ttft.add(ALONE, ask_burst("chats", server.url, CHAT_S))
                with posting(server, pages, salt + "b"):
                    self.ttft.add(BESIDE, ask_burst("chats", server.url, CHAT_S))
            wait_until_empty(server)  # the posting clients have disconnected

    @property
    def quantities(self) -> list[Quantity]:
        """All rows."""
        rows = (*self.health.quantities, self.rate, self.memory, self.refusal)
        return [*rows, *self.ttft.quantities]


class FamilyResults:
    """Measurements of one family, whose processor takes its own time for a page."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.health = Result(f"{family}: /health", [ALONE, BESIDE])
        self.ttft = Result(f"{family}: TTFT", [ALONE, BESIDE])
        self.page = Quantity(f"{family}: one page at a time", "ms", {ALONE: []})
        self.refusal = Quantity(f"{family}: {REFUSAL}", "ms", {ALONE: []})
        self.rate = Quantity(f"{family}: images", "1/s", {BESIDE: []}, higher_is_better=True)

    def measure(self, folder: Path, salt: str) -> None:
        """Measure one round."""
        pages = str(folder)
        flags = (*MOCK, "--preprocess-procs", "1")
        with headrace(str(vision_folder(self.family)), *flags) as server:
            ask_burst("chats", server.url, 1)
            with HealthProbe(server.url) as probe:
                self.ttft.add(ALONE, ask_burst("chats", server.url, FAMILY_CHAT_S))
            self.health.add(ALONE, probe.latencies_ms)
            for number in range(PAGES_ALONE):
                with posting(server, pages, f"{salt}{number}", 1) as poster:
                    self.page.samples[ALONE].append(1e3 / outcome(poster))
            num_clients = FAMILY_CLIENTS
            with HealthProbe(server.url) as probe, posting(server, pages, salt, num_clients) as all:
                self.rate.samples[BESIDE].append(outcome(all))
            self.health.add(BESIDE, probe.latencies_ms)
            with posting(server, pages, salt + "b", num_clients):
                self.ttft.add(BESIDE, ask_burst("chats", server.url, FAMILY_CHAT_S))
            wait_until_empty(server)  # the posting clients have disconnected
            self.refusal.samples[ALONE].append(max(refusals_ms(server)))

    @property
    def quantities(self) -> list[Quantity]:
        """All rows."""
        rows = (self.page, self.rate, self.refusal)
        return [*self.health.quantities, *self.ttft.quantities, *rows]


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=2)
    options.add_argument("--family", nargs="+", choices=FAMILIES, default=[], help="see above")
    args = options.parse_args()
    report, results = Report("images", args), Results()
    families = [FamilyResults(family) for family in args.family]
    with TemporaryDirectory() as name:
        write_pages(Path(name))
        for round in range(args.rounds):
            for family in families:
                family.measure(Path(name), f"{round}")
            for num_procs in () if families else PROCESSES:
                results.measure(Path(name), num_procs, f"{round}")
    for quantity in [row for one in families or [results] for row in one.quantities]:
        report.add(quantity)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["post"]:
        post(*sys.argv[2:])
    else:
        main()
