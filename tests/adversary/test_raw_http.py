"""Raw HTTP: each request has one answer, and no byte of a body is ever taken for a request."""

import contextlib
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from attack_rounds import attack_rounds
from http_faults import FAULTS
from raw_http import (
    H2C,
    INNER,
    JSON,
    PLAIN,
    WEBSOCKET,
    Request,
    check_answers,
    faulty_request,
    parse_answers,
    right_request,
)
from servers import PATIENCE_S, RunningServer

NUM_CLIENTS = 4
NUM_CONNECTIONS = 16  # in a round
NUM_SLOW = 100
PAUSE_S = 0.3  # longer than a proxy takes to forward a body after its head
CLOSE = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
LAST = Request(b"/last", CLOSE, b"")


@pytest.fixture(scope="module")
def mock() -> Iterator[RunningServer]:
    running = RunningServer("--engine", "mock")
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.log


def exchange(url: httpx.URL, pieces: list[bytes], pause_s: float = 0.0) -> bytes:
    """Send pieces, each after a pause but the first; return what comes until the server closes."""
    received = b""
    with socket.create_connection((url.host, url.port), PATIENCE_S) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for number, piece in enumerate(pieces):
                if number and pause_s:
                    client.settimeout(pause_s)
                    with contextlib.suppress(TimeoutError):
                        received += client.recv(1 << 16)
                    client.settimeout(PATIENCE_S)
                client.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has refused and closed: its answer is still to be read
        try:
            while data := client.recv(1 << 16):
                received += data
        except ConnectionResetError:
            pass
    return received


def pieces_of(data: bytes, rng: random.Random) -> list[bytes]:
    """Cut what is sent: not at all, at every byte, or here and there."""
    match rng.randrange(3):
        case 0:
            return [data]
        case 1 if len(data) < 20_000:
            return [data[i : i + 1] for i in range(len(data))]
        case _:
            places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 9)))
            return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def attack(url: httpx.URL, seed: float) -> None:
    """Send a few requests on a connection, at most one of them faulty, and look at the answers."""
    rng = random.Random(seed)
    requests = [right_request(b"/nowhere/%d" % n, rng) for n in range(rng.randrange(1, 6))]
    if rng.random() < 0.6:
        place = rng.randrange(len(requests) + 1)
        requests.insert(place, faulty_request(b"/faulty", rng))
    requests.append(LAST)
    data = b"".join(request.data for request in requests)
    if rng.random() < 0.3:
        pieces, pause_s = (
            [part for r in requests for part in (r.head, r.body) if part],
            PAUSE_S / 10,
        )
    else:
        pieces, pause_s = pieces_of(data, rng), 0.0
    received = exchange(url, pieces, pause_s)
    try:
        check_answers(requests, parse_answers(received))
    except Exception as error:
        error.add_note(f"sent {pieces!r}\nreceived {received!r}")
        raise


def test_pipelined_requests_have_one_answer_each(mock: RunningServer) -> None:
    url = httpx.URL(mock.url)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for rng in attack_rounds("raw HTTP", 0.15):
            seeds = [rng.random() for _ in range(NUM_CONNECTIONS)]
            for done in pool.map(lambda seed: attack(url, seed), seeds):
                assert done is None


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_never_turns_a_body_into_a_request(mock: RunningServer, fault: str) -> None:
    rng = random.Random(fault)
    faulty = faulty_request(b"/faulty", rng, fault)
    after = [right_request(b"/nowhere/1", rng, PLAIN), LAST]
    pieces = [faulty.head, faulty.body, b"".join(request.data for request in after)]
    received = exchange(httpx.URL(mock.url), pieces, PAUSE_S / 10)
    check_answers([faulty, *after], parse_answers(received))


@pytest.mark.parametrize("fault", ["a negative length", "a signed size", "HTTP/1.2"])
def test_refusal_comes_after_the_answers_before_it(mock: RunningServer, fault: str) -> None:
    rng = random.Random(fault)
    before = [right_request(b"/nowhere/%d" % number, rng, PLAIN) for number in range(3)]
    requests = [*before, faulty_request(b"/faulty", rng, fault), LAST]
    data = b"".join(request.data for request in requests)
    answers = parse_answers(exchange(httpx.URL(mock.url), [data]))
    check_answers(requests, answers)
    assert len(answers) == len(before) + 1


@pytest.mark.parametrize("extra", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
def test_late_body_behind_an_upgrade_is_a_body(mock: RunningServer, extra: bytes) -> None:
    for method in (b"GET", b"POST"):
        line = method + b" /nowhere/0 HTTP/1.1\r\nHost: x\r\n" + JSON + extra
        head = line + b"Content-Length: %d\r\n\r\n" % len(INNER)
        received = exchange(httpx.URL(mock.url), [head, INNER, CLOSE], PAUSE_S)
        check_answers([Request(b"/nowhere/0", head, INNER), LAST], parse_answers(received))


def test_clients_that_leave_early_leave_nothing(mock: RunningServer) -> None:
    url = httpx.URL(mock.url)
    for rng in attack_rounds("early ends", 0.03):
        for _ in range(NUM_CONNECTIONS):
            data = b"".join(right_request(b"/nowhere/0", rng).data for _ in range(8))
            with (
                socket.create_connection((url.host, url.port), PATIENCE_S) as client,
                contextlib.suppress(BrokenPipeError, ConnectionResetError),
            ):
                client.sendall(data[: rng.randrange(len(data))])
                if rng.random() < 0.5:  # what has come is answered before the server closes
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(1 << 16):
                        pass
    mock.settle()


def test_slow_heads_delay_no_other_client(mock: RunningServer) -> None:
    url = httpx.URL(mock.url)
    head = b"GET /nowhere/0 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection((url.host, url.port), PATIENCE_S))
            for _ in range(NUM_SLOW)
        ]
        for at in range(len(head)):
            for client in clients:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    client.sendall(head[at : at + 1])
            attack(url, at)
        for client in clients:
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while data := client.recv(1 << 16):
                    received += data
            (answer,) = parse_answers(received)
            assert answer.status in (404, 408)
