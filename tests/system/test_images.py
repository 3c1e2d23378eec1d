"""Images on their way to the engine: rejections, and deaths of processes that clients do not see.

The engine is a mock, which is done with an image once its prompt is computed.
"""

import base64
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import hostile_images
import httpx
import openai
import pytest
from hostile_images import BOMB, PNG
from image_parts import data_url, encoded, image_part, message
from mutants.mutants import mutants
from servers import HELD, PATIENCE_S, RunningServer, wait_until
from tiny_vision import make_vision_folder, picture

from headrace.board.board import Seat
from headrace.cli.replay import read_burst
from headrace.errors import HeadraceError

PATH = "/v1/chat/completions"
LANES = ("headrace: tokenizer 2", "headrace: tokenizer 3")
WHERE = "messages[0].content[1].image_url"
NUM_CLIENTS = 8
NUM_LEAVING = 40
BAD = [
    *hostile_images.BAD,
    ("http://169.254.169.254/latest/meta-data", "is none of this server's --allowed"),
    ("http://localhost/x.png", "localhost is not at a public address"),
]
BAD_FILES = [
    ("/to?http://169.254.169.254/latest/meta-data", "169.254.169.254 is none of"),
    ("/to?http://localhost/x.png", "localhost is not at a public address"),
    ("/to?/to?/to?/to?/x.png", "redirected more than 3 times"),
    ("/missing", "its server answers 404"),
    ("/text", "says that it is text/html, not an image"),
    ("/bomb", "30000 x 30000 pixels"),
    ("/broken", "cannot be decoded"),
    ("/wrong", "says that it is image/jpeg, and is PNG"),
    ("/endless", "more than the 20971520 bytes of an image"),
]
FILES = {
    "/x.png": ("image/png", PNG),
    "/text": ("text/html", b"<html>"),
    "/bomb": ("image/png", BOMB),
    "/broken": ("image/png", PNG[:-200]),
    "/wrong": ("image/jpeg", PNG),
}


class PictureServer(ThreadingHTTPServer):
    """Has images; `/to?URL` redirects, `/slow` answers when it is let."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), PictureHandler)
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.where = f"127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class PictureHandler(BaseHTTPRequestHandler):
    server: PictureServer

    def do_GET(self) -> None:
        path, _, rest = self.path.partition("?")
        with contextlib.suppress(ConnectionError):  # the client may have died
            if path == "/to":
                self.send_response(302)
                self.send_header("Location", rest)
                self.end_headers()
            elif path == "/slow":
                self.server.is_asked.set()
                self.server.may_answer.wait(PATIENCE_S)
                self.send_file("image/png", PNG)
            elif path == "/endless":
                self.send_file("image/png", bytes(30 << 20), has_length=False)
            elif path in FILES:
                self.send_file(*FILES[path])
            else:
                self.send_error(404)

    def send_file(self, kind: str, data: bytes, has_length: bool = True) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        if has_length:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def pictures() -> Iterator[PictureServer]:
    with PictureServer() as serving:
        yield serving
        serving.shutdown()


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, pictures: PictureServer
) -> Iterator[RunningServer]:
    """Two processes for images, 10 ms a step."""
    folder = tmp_path_factory.mktemp("vision") / "smolvlm"
    make_vision_folder(folder, "smolvlm")
    profile = folder.parent / "10ms.json"
    profile.write_text('{"step_ms": [[0, 10]]}')
    running = RunningServer(
        *(str(folder), "--engine", "mock", "--mock-profile", str(profile)),
        *("--preprocess-procs", "2", *HELD),
        *("--image-memory-bytes", str(16 << 20), "--max-images", "3"),
        *("--allowed-media-domains", pictures.where, "--allowed-media-domains", "localhost"),
        *("--record", str(tmp_path_factory.getbasetemp() / "images")),
        env=mutants("fetcher=patient"),
    )
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.log


def ask(server: RunningServer, *parts: Any, **fields: Any) -> httpx.Response:
    body = {"messages": [message(*parts)], "max_tokens": 4} | fields
    return httpx.post(f"{server.url}{PATH}", json=body, timeout=PATIENCE_S)


def queued_bytes(server: RunningServer) -> float:
    """Return how much waits for tokenizers, less this request, which is a byte."""
    return server.metric("tokenizer_queue_bytes") - 1


def begin_asking(server: RunningServer, body: bytes) -> socket.socket:
    """Ask, and wait for nothing."""
    where = urlsplit(server.url)
    assert where.hostname is not None
    client = socket.create_connection((where.hostname, where.port or 80))
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def picture_part(seed: int) -> dict[str, Any]:
    return image_part(data_url(encoded(picture(seed, 200, 150), "JPEG"), "image/jpeg"))


@contextmanager
def asked(server: RunningServer, max_tokens: int = 100) -> Iterator[list["Future[httpx.Response]"]]:
    """Ask with an image each, all at once; at the end all have been answered."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        asking = [
            pool.submit(ask, server, "look", picture_part(i), max_tokens=max_tokens)
            for i in range(NUM_CLIENTS)
        ]
        yield asking
    answers = [future.result() for future in asking]
    assert [answer.status_code for answer in answers] == [200] * NUM_CLIENTS
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {max_tokens}


def handled(server: RunningServer) -> dict[str, float]:
    """Return how many requests each tokenizer process has handled."""
    text = server.metrics()
    found = re.findall(r'tokenizer_requests_total{.*process="(.*?)"} (\S+)', text)
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize(("url", "why"), BAD, ids=[why for _, why in BAD])
def test_what_is_no_good_image_is_a_400_that_names_its_part(
    server: RunningServer, url: str, why: str
) -> None:
    before = server.ring
    answer = ask(server, "look", image_part(url))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == WHERE
    assert why in error["message"]
    assert server.ring == before
    assert ask(server, "look", image_part(data_url(PNG))).status_code == 200


@pytest.mark.parametrize(("path", "why"), BAD_FILES, ids=[path for path, _ in BAD_FILES])
def test_what_is_elsewhere_and_no_good_image_is_one_too(
    server: RunningServer, pictures: PictureServer, path: str, why: str
) -> None:
    answer = ask(server, "look", image_part(f"http://{pictures.where}{path}"))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == WHERE
    assert why in error["message"]


def test_an_image_that_is_elsewhere_is_as_if_it_were_here(
    server: RunningServer, pictures: PictureServer
) -> None:
    url, here = f"http://{pictures.where}/to?/x.png", image_part(data_url(PNG))
    found = server.metric("images_found_total")
    answers = [ask(server, "look", part, image_part(url)) for part in (here, image_part(url))]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["usage"] == answers[1].json()["usage"]
    assert server.metric("images_found_total") - found >= 3
    tokens = httpx.post(
        f"{server.url}/tokenize", json={"messages": [message("look", here, image_part(url))]}
    )
    assert tokens.json()["count"] == answers[0].json()["usage"]["prompt_tokens"]
    wait_until(lambda: server.metric("image_bytes_sent") == 0, "the engine is done with all")


def test_a_fetcher_that_dies_is_replaced_and_asked_again(
    server: RunningServer, pictures: PictureServer
) -> None:
    url, name = f"http://{pictures.where}/slow", "headrace: fetcher"
    victims, others = set(), []
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        looking = pool.submit(ask, server, "look", image_part(url))
        for _ in range(2):
            assert pictures.is_asked.wait(PATIENCE_S)
            pictures.is_asked.clear()
            victim = server.ring[name]
            victim.kill()
            victims.add(victim.pid)
            others.append(pool.submit(ask, server, "look", picture_part(0)))
        assert pictures.is_asked.wait(PATIENCE_S)
        pictures.may_answer.set()
        assert looking.result().status_code == 200
        assert [other.result().status_code for other in others] == [200, 200], "they never notice"
    assert server.ring[name].pid not in victims
    assert len(victims) == 2


def test_what_fetchers_die_of_fails_alone(server: RunningServer, pictures: PictureServer) -> None:
    pictures.may_answer.clear()
    pictures.is_asked.clear()
    with ThreadPoolExecutor() as pool:
        looking = pool.submit(ask, server, "look", image_part(f"http://{pictures.where}/slow"))
        for _ in range(3):
            assert pictures.is_asked.wait(PATIENCE_S)
            pictures.is_asked.clear()
            server.ring["headrace: fetcher"].kill()
        assert looking.result().status_code == 500
    pictures.may_answer.set()
    url = f"http://{pictures.where}/x.png"
    assert ask(server, "look", image_part(url)).status_code == 200
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200, "all are well")


def test_openais_client_may_show_images(server: RunningServer, pictures: PictureServer) -> None:
    urls = [data_url(PNG), f"http://{pictures.where}/x.png"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        one, two = (
            client.responses.create(
                model=client.models.list().data[0].id,
                max_output_tokens=4,
                input=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": url, "detail": "auto"}
                            for url in urls[:n]
                        ],
                    }
                ],
            )
            for n in (1, 2)
        )
        with pytest.raises(openai.BadRequestError, match="30000 x 30000 pixels") as refused:
            client.responses.create(
                model=one.model,
                input=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": data_url(BOMB), "detail": "low"}
                        ],
                    }
                ],
            )
    assert two.usage and one.usage and two.usage.input_tokens - one.usage.input_tokens > 20
    assert refused.value.param == "input[0].content[0].image_url"


def test_anthropics_client_may_show_images(server: RunningServer, pictures: PictureServer) -> None:
    def source(data: bytes) -> Any:
        return {
            "type": "base64",
            "media_type": "image/png",
            "data": base64.b64encode(data).decode(),
        }

    url: Any = {"type": "url", "url": f"http://{pictures.where}/x.png"}
    where = r"messages\[0\].content\[0\].source: 30000 x 30000 pixels"
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        model = client.models.list().data[0].id
        for sources in ([source(PNG)], [source(PNG), url]):
            content: Any = [{"type": "image", "source": one} for one in sources]
            said: Any = [{"role": "user", "content": content}]
            answer = client.messages.create(model=model, max_tokens=4, messages=said)
            counted = client.messages.count_tokens(model=model, messages=said)
            usage = answer.usage
            assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        with pytest.raises(anthropic.BadRequestError, match=where):
            content = [{"type": "image", "source": source(BOMB)}]
            said = [{"role": "user", "content": content}]
            client.messages.create(model=model, max_tokens=4, messages=said)


def test_more_images_than_may_be_are_a_400(server: RunningServer) -> None:
    answer = ask(server, *[picture_part(0)] * 4)
    assert answer.status_code == 400
    assert "4 images are more than the 3" in answer.json()["error"]["message"]


def test_images_count_as_prompt_tokens(server: RunningServer) -> None:
    num = [
        ask(server, "look", *[picture_part(1)] * n).json()["usage"]["prompt_tokens"]
        for n in range(3)
    ]
    assert num[2] - num[1] == num[1] - num[0] > 20


def test_a_text_never_sees_a_process_of_images(server: RunningServer) -> None:
    wait_until(lambda: queued_bytes(server) == 0, "nothing is at hand")
    before = handled(server)
    assert ask(server, "no image").status_code == 200
    assert ask(server, "x" * 70_000, max_tokens=1).status_code == 400  # too long for the model
    wait_until(lambda: queued_bytes(server) == 0, "nothing is at hand")
    after = handled(server)
    counts = {name: after[name] - before[name] for name in after}  # the last answers GETs
    assert [counts[f"tokenizer {index}"] for index in (1, 2, 3)] == [1, 0, 0]
    ring = server.ring
    for lane in LANES:
        ring[lane].suspend()
    try:
        with ThreadPoolExecutor() as pool:
            looking = pool.submit(ask, server, "look", picture_part(5))
            wait_until(lambda: queued_bytes(server) > 0, "an image waits")
            assert ask(server, "no image").status_code == 200
            assert not looking.done()
            for lane in LANES:
                ring[lane].resume()
            assert looking.result().status_code == 200
    finally:
        for lane in LANES:
            ring[lane].resume()


def test_disconnected_client_is_not_waited_for(server: RunningServer) -> None:
    counters = ("images_total", "tokenizer_abandoned_total", "http_disconnects_total")
    before = {name: server.metric(name) for name in counters}

    def since(name: str) -> float:
        return server.metric(name) - before[name]

    asked = [{"messages": [message(picture_part(seed))]} for seed in range(NUM_LEAVING)]
    bodies = [json.dumps(body).encode() for body in asked]
    num_bytes = sum(len(body) + 1 for body in bodies)
    ring = server.ring
    for lane in LANES:
        ring[lane].suspend()
    try:
        with contextlib.ExitStack() as asking:
            for body in bodies:
                asking.enter_context(begin_asking(server, body))
            # A page published earlier lacks the byte of the request for it.
            wait_until(lambda: queued_bytes(server) in (num_bytes - 1, num_bytes), "all wait")
        wait_until(lambda: since("http_disconnects_total") == NUM_LEAVING, "all have left")
    finally:
        for lane in LANES:
            ring[lane].resume()
    assert ask(server, "look", picture_part(0)).status_code == 200
    wait_until(lambda: queued_bytes(server) == 0, "none waits")
    num_all = NUM_LEAVING + 1
    # Some images are taken before their abort arrives; a request may be dropped after its image.
    assert since("images_total") + since("tokenizer_abandoned_total") >= num_all
    assert since("images_total") <= num_all // 4
    wait_until(lambda: server.metric("image_bytes_sent") == 0, "the engine is done with all")


def test_disconnected_client_has_no_images_fetched(
    server: RunningServer, pictures: PictureServer
) -> None:
    pictures.may_answer.clear()
    pictures.is_asked.clear()
    abandoned = server.metric("tokenizer_abandoned_total")
    body = {"messages": [message(image_part(f"http://{pictures.where}/slow"))]}
    try:
        with begin_asking(server, json.dumps(body).encode()):
            assert pictures.is_asked.wait(PATIENCE_S)
        wait_until(
            lambda: server.metric("tokenizer_abandoned_total") == abandoned + 1, "it is dropped"
        )
    finally:
        pictures.may_answer.set()
    url = f"http://{pictures.where}/x.png"
    assert ask(server, "look", image_part(url)).status_code == 200


def test_all_images_are_let_go(server: RunningServer) -> None:
    found = server.metric("images_found_total")
    for _ in range(len(LANES) + 1):  # each image comes to some process twice
        with asked(server):
            pass
        wait_until(lambda: server.metric("image_bytes_sent") == 0, "the engine is done with all")
    assert server.metric("image_bytes") > 0
    assert server.metric("images_found_total") - found >= NUM_CLIENTS


def test_the_load_generator_asks_with_images(server: RunningServer) -> None:
    before = server.metric("images_total")
    command = [str(Path(sys.executable).parent / "headrace"), "bench", "serve", "--images", "2"]
    command += ["--image-dpi", "20", "--num-prompts", "5", "--random-input-len", "20"]
    command += ["--random-output-len", "4", "--base-url", server.url, "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert server.metric("images_total") - before == 2 * (5 + 1)  # one to warm up


def test_recording_with_shared_images_is_not_replayed_alone(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    record = tmp_path_factory.getbasetemp() / "images"
    for seat in (Seat("engine", 0), Seat("tokenizer", 2)):
        with pytest.raises(HeadraceError, match=f"{seat} shares images with others"):
            read_burst(record, seat)
    assert read_burst(record, Seat("tokenizer", 0)) is not None


@pytest.mark.parametrize("title", [LANES[0], "headrace: engine"])
def test_a_death_loses_no_image(server: RunningServer, title: str) -> None:
    victim = server.ring[title]
    steps = server.metric("engine_steps_total")
    with asked(server, max_tokens=200):
        wait_until(lambda: server.metric("engine_steps_total") > steps, "some run")
        victim.send_signal(signal.SIGKILL)
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200, "all are well")
    wait_until(lambda: server.metric("image_bytes_sent") == 0, "the engine is done with all")
    assert server.ring[title].pid != victim.pid


def test_bench_sends_random_images(server: RunningServer) -> None:
    before = server.metric("images_total")
    command = [str(Path(sys.executable).parent / "headrace"), "bench", "serve", "--disable-tqdm"]
    command += ["--base-url", server.url, "--dataset-name", "random-mm", "--num-prompts", "3"]
    command += ["--random-input-len", "8", "--random-output-len", "2", "--num-warmups", "0"]
    command += ["--random-mm-base-items-per-request", "2"]
    command += ["--random-mm-bucket-config", "{(32, 48, 1): 1.0}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "Successful requests:                     3" in done.stdout, done.stdout + done.stderr
    assert server.metric("images_total") == before + 6
