"""How clients get in: by port or path, with keys, over TLS; and what they cannot do there."""

import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
import trustme
from readable import readable
from servers import RunningServer, wait_until

from headrace.ipc.router import HUGE_BODY_BYTES

TIMEOUT_S = 300
MOCK = ("--engine", "mock")
BODY = {"prompt": "x", "max_tokens": 3}
TEXT = "/v1/completions"
# The JDK's client asks for HTTP/2 in clear (Upgrade: h2c) unless it is told otherwise.
JAVA = """
import java.net.URI;
import java.net.http.*;

public class Ask {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        HttpRequest request = HttpRequest.newBuilder(URI.create(args[0]))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(args[1])).build();
        for (int i = 0; i < 3; i++)
            System.out.println(
                client.send(request, HttpResponse.BodyHandlers.ofString()).statusCode());
    }
}
"""
JSON = "content-type: application/json\r\n"


@pytest.fixture
def servers() -> Iterator[list[RunningServer]]:
    """What a test starts, ended after it."""
    started: list[RunningServer] = []
    yield started
    for server in started:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server with two frontends and little room, whose steps take no time."""
    flags = ("--frontend-procs", "2", "--max-body-bytes", "1000000")
    running = RunningServer(*MOCK, *flags)
    yield running
    running.close()


def address(server: RunningServer) -> tuple[str, int]:
    url = httpx.URL(server.url)
    assert url.port is not None
    return url.host, url.port


def is_served(server: RunningServer) -> bool:
    return httpx.post(server.url + TEXT, json=BODY, timeout=TIMEOUT_S).status_code == 200


def test_a_path_is_served_and_removed(servers: list[RunningServer], tmp_path: Path) -> None:
    path = tmp_path / "headrace.sock"
    servers += [RunningServer(*MOCK, "--uds", str(path), "--frontend-procs", "2")]
    assert f"--unix-socket {path}" in servers[0].log
    for _ in range(4):
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            answer = client.post(f"http://x{TEXT}", json=BODY, timeout=TIMEOUT_S)
            assert answer.json()["usage"]["completion_tokens"] == 3
    assert servers[0].stop() == 0
    assert not path.exists()


def test_https_is_served(servers: list[RunningServer], tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(cert)
    certificate.private_key_pem.write_to_path(key)
    servers += [RunningServer(*MOCK, "--ssl-certfile", str(cert), "--ssl-keyfile", str(key))]
    url = servers[0].url
    assert url.startswith("https://")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    answer = httpx.post(url + TEXT, json=BODY, verify=context, timeout=TIMEOUT_S)
    assert answer.json()["usage"]["completion_tokens"] == 3
    with pytest.raises(httpx.HTTPError):
        httpx.post(url.replace("https", "http") + TEXT, json=BODY, timeout=TIMEOUT_S)


def test_keys_and_origins(servers: list[RunningServer]) -> None:
    flags = ("--api-key", "flag-key", "--allowed-origins", "https://app.example")
    servers += [RunningServer(*MOCK, *flags, env={"HEADRACE_API_KEY": "variable-key"})]
    url = servers[0].url
    assert "Authorization: Bearer KEY" in servers[0].log
    for key in ("flag-key", "variable-key"):
        client = openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
        assert client.completions.create(model=client.models.list().data[0].id, prompt="x")
    with pytest.raises(openai.AuthenticationError, match="needs an API key"):
        openai.OpenAI(base_url=url + "/v1", api_key="other", max_retries=0).models.list()
    assert httpx.get(url + "/metrics").status_code == 401
    assert httpx.get(url + "/nowhere").status_code == 401
    assert httpx.get(url + "/health").status_code == 200
    assert not {"flag-key", "variable-key"} & set(servers[0].log.split())
    for origin, allowed in (("https://app.example", True), ("https://other.example", False)):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        preflight = httpx.options(url + TEXT, headers=headers)
        assert (preflight.status_code == 200) == allowed
        assert ("access-control-allow-origin" in preflight.headers) == allowed


def test_origins_are_not_named_unless_asked_for(server: RunningServer) -> None:
    answer = httpx.get(server.url + "/version", headers={"Origin": "https://app.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_all_frontends_serve(server: RunningServer) -> None:
    def counts() -> list[float]:
        text = server.metrics()
        lines = [x for x in text.splitlines() if x.startswith("headrace:http_requests_total")]
        return [float(line.split()[-1]) for line in lines]

    wait_until(lambda: is_served(server) and all(counts()), "both frontends have served")
    assert len(counts()) == 2


def test_each_part_reports_its_time(server: RunningServer) -> None:
    for stream in (False, True):
        answer = httpx.post(
            server.url + TEXT, json=BODY | {"stream": stream}, headers={"X-Request-Timing": "1"}
        )
        entries = [entry.split(";dur=") for entry in answer.headers["server-timing"].split(", ")]
        names = [name for name, _ in entries]
        assert names == ["accept", "parse", "tokenize", "submit", "queue", "prefill", "render"]
        assert all(0 <= float(ms) < 1000 * TIMEOUT_S for _, ms in entries), entries
    assert "server-timing" not in httpx.post(server.url + TEXT, json=BODY).headers
    for name in ("time_to_first_token", "e2e_request_latency", "event_loop_lag"):
        assert server.metric(f"{name}_seconds_count") > 0


@pytest.mark.parametrize("framing", ["content-length: 1000000000", "transfer-encoding: chunked"])
def test_a_body_of_a_gigabyte_is_refused(server: RunningServer, framing: str) -> None:
    with socket.create_connection(address(server), TIMEOUT_S) as client:
        client.sendall(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\n{JSON}{framing}\r\n\r\n".encode())
        if "chunked" in framing:
            client.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            for _ in range(30):
                client.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        head = client.recv(1 << 16)
    assert head.startswith(b"HTTP/1.1 413 ")
    assert is_served(server)


def test_questions_are_answered_while_texts_are_written(server: RunningServer) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 8000, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\n{JSON}content-length: {len(body)}\r\n\r\n"
    with ExitStack() as clients:
        for _ in range(60):
            client = clients.enter_context(socket.create_connection(address(server), TIMEOUT_S))
            client.sendall(head.encode() + body)
        for path in ("/health", "/v1/models", "/metrics") * 10:
            assert httpx.get(server.url + path, timeout=TIMEOUT_S).status_code == 200
            assert httpx.head(server.url + path, timeout=TIMEOUT_S).content == b""
    wait_until(lambda: server.metric("http_requests_open") == 1, "no other request is open")


def test_get_overtakes_long_bodies_that_wait(server: RunningServer) -> None:
    body = json.dumps({"prompt": "word " * 20_000}).encode()  # for the process of long bodies
    head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\n{JSON}content-length: {len(body)}\r\n\r\n"
    long = server.ring["headrace: tokenizer 1"]
    with ExitStack() as clients:
        long.suspend()
        clients.callback(long.resume)
        waiting = []
        for _ in range(8):
            waiting.append(clients.enter_context(socket.create_connection(address(server))))
            waiting[-1].sendall(head.encode() + body)
        wait_until(lambda: server.metric("tokenizer_queue_bytes") > len(body), "some wait")
        for path in ("/health", "/v1/models", "/metrics"):
            assert httpx.get(server.url + path, timeout=TIMEOUT_S).status_code == 200
        assert not readable(waiting, 0), "none of those has an answer"
        long.resume()
        for client in waiting:
            client.settimeout(TIMEOUT_S)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_long_body_overtakes_a_huge_one_at_work(server: RunningServer) -> None:
    huge = json.dumps({"prompt": "word " * (HUGE_BODY_BYTES // 5)}).encode()
    long = json.dumps({"prompt": "word " * 15_000}).encode()
    headers = {"Content-Type": "application/json"}
    head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\n{JSON}content-length: {len(huge)}\r\n\r\n"

    def post(body: bytes) -> int:
        url = server.url + "/tokenize"
        return httpx.post(url, content=body, headers=headers, timeout=TIMEOUT_S).status_code

    assert post(huge) == 200
    tokenizer = server.ring["headrace: tokenizer 1"]
    child = server.processes[f"headrace: offload of {tokenizer.pid}"]
    with ExitStack() as clients:
        child.suspend()
        clients.callback(child.resume)
        waiting = clients.enter_context(socket.create_connection(address(server), TIMEOUT_S))
        waiting.sendall(head.encode() + huge)
        wait_until(lambda: server.metric("tokenizer_queue_bytes") > len(huge), "it waits")
        assert post(long) == 200
        assert not readable([waiting], 0), "the huge one has no answer"
        child.resume()
        assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_models_are_listed_as_anthropic_does(server: RunningServer) -> None:
    listed = anthropic.Anthropic(base_url=server.url, api_key="any").models.list()
    (model,) = listed.data
    assert (model.type, listed.first_id, listed.last_id) == ("model", model.id, model.id)
    assert not listed.has_more
    assert model.created_at.tzinfo is not None


@pytest.mark.skipif(shutil.which("java") is None, reason="there is no java here")
def test_java_asks_for_another_protocol_and_is_served(
    server: RunningServer, tmp_path: Path
) -> None:
    source = tmp_path / "Ask.java"
    source.write_text(JAVA)
    command = ["java", str(source), server.url + TEXT, json.dumps(BODY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout.split() == ["200", "200", "200"], done.stderr


def test_half_closed_client_is_answered(server: RunningServer) -> None:
    for stream in (False, True):
        body = json.dumps(BODY | {"stream": stream}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\n{JSON}content-length: {len(body)}\r\n\r\n"
        with socket.create_connection(address(server), TIMEOUT_S) as client:
            client.sendall(head.encode() + body)
            client.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert (b"[DONE]" if stream else b'"usage"') in answer


def test_idle_connections_take_no_place(server: RunningServer) -> None:
    with ExitStack() as idle:
        for _ in range(300):
            idle.enter_context(socket.create_connection(address(server), TIMEOUT_S))
        wait_until(lambda: server.metric("http_connections") >= 300, "all are connected")
        assert is_served(server)
    wait_until(lambda: server.metric("http_connections") < 300, "all have left")


def test_a_client_that_never_reads_is_cut_off_alone(server: RunningServer) -> None:
    # With usage in every event, so that there is much to say.
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompts = {"prompt": ["x"] * 16, "max_tokens": 8000}
    body = json.dumps(prompts | {"stream": True, "stream_options": options}).encode()
    server.settle()
    num_before = server.metric("http_disconnects_total")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address(server))
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\n{JSON}content-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_until(lambda: server.metric("http_disconnects_total") > num_before, "it is cut off")
        assert is_served(server)
    wait_until(lambda: server.metric("num_requests_running") == 0, "nothing runs for it")
    wait_until(lambda: server.metric("http_unsent_bytes") == 0, "nothing is kept for it")
