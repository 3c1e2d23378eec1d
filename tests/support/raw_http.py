"""Raw HTTP/1.1 requests, right and faulty, and what their answers must be. Pure.

Every request names what does not exist, so its answer, a 404, names it, too. Every body is made of
requests: a server that takes a byte of a body for a request answers with `SMUGGLED`.

Sources: RFC 9112 sections 2.2, 5, 6 and 7; RFC 9110 sections 7.8 and 9.3.6.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from http_faults import FAULTS

SMUGGLED = b"/smuggled"
INNER = b"GET " + SMUGGLED + b" HTTP/1.1\r\nHost: x\r\n\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAA\r\n"
WEBSOCKET = (
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
JSON = b"Content-Type: application/json\r\n"
PLAIN = (
    b"",
    b"Connection: keep-alive\r\n",
    b"Accept: */*\r\nX-Long: " + b"x" * 8000 + b"\r\n",
    b"X-Odd: \t a \xe4 b \t\r\nX-Empty:\r\n",
    b"Expect: 100-continue\r\n",
)
EXTRAS = (*PLAIN, H2C, WEBSOCKET, b"Upgrade: TLS/1.3\r\nConnection: Upgrade\r\n")
ANSWER = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")
LENGTH = re.compile(rb"^content-length:\s*(\d+)\r$", re.IGNORECASE | re.MULTILINE)
CHUNKED = re.compile(rb"^transfer-encoding:\s*chunked\r$", re.IGNORECASE | re.MULTILINE)
CHUNK = re.compile(rb"([0-9a-fA-F]+)\r\n")


@dataclass(frozen=True)
class Request:
    """One request, as it is sent."""

    path: bytes
    head: bytes
    body: bytes
    fault: str = ""  # where there is one, a server may refuse it and close the connection

    @property
    def data(self) -> bytes:
        return self.head + self.body


@dataclass(frozen=True)
class Answer:
    """One final response."""

    status: int
    body: bytes


def parse_answers(data: bytes) -> list[Answer]:
    """Return the final responses in what a server has sent.

    Raises:
        ValueError: it is not a sequence of whole responses.
    """
    answers, at = [], 0
    while at < len(data):
        match = ANSWER.match(data, at)
        if match is None:
            raise ValueError(f"not a response: {data[at : at + 200]!r}")
        at, status, head = match.end(), int(match[1]), match[2]
        if status < 200:
            continue
        if CHUNKED.search(head):
            body, at = parse_chunks(data, at)
        else:
            length = LENGTH.search(head)
            if length is None:
                raise ValueError(f"a response without a length: {head!r}")
            body = data[at : at + int(length[1])]
            at += int(length[1])
        if at > len(data):
            raise ValueError(f"a response that is cut short: {data[-200:]!r}")
        answers.append(Answer(status, body))
    return answers


def parse_chunks(data: bytes, at: int) -> tuple[bytes, int]:
    """Return a chunked body that begins at `at`, and where it ends."""
    body = b""
    while match := CHUNK.match(data, at):
        size = int(match[1], 16)
        at = match.end() + size + 2
        body += data[match.end() : match.end() + size]
        if size == 0:
            return body, at
    raise ValueError(f"not a chunk: {data[at : at + 200]!r}")


def check_answers(requests: list[Request], answers: list[Answer]) -> None:
    """Assert that each request has one answer, in order, and nothing else has any.

    A faulty request may be refused, which ends the connection behind its answer.
    """
    for answer in answers:
        assert SMUGGLED not in answer.body, "bytes of a body were taken for a request"
        assert answer.status < 500 or answer.status in (501, 505), answer
    fault = next((index for index, request in enumerate(requests) if request.fault), None)
    is_refused = fault is not None and len(answers) == fault + 1
    assert is_refused or len(answers) == len(requests), f"{len(answers)} of {len(requests)} answers"
    answered = zip(requests, answers[:-1] if is_refused else answers, strict=False)
    for request, answer in answered:
        if not request.fault:
            assert (answer.status, request.path in answer.body) == (404, True), (request, answer)
    assert not is_refused or answers[-1].status >= 400, answers[-1]


def body_of(rng: random.Random) -> bytes:
    """Return a body that has requests in it."""
    prefix = rng.choice((b"", b"\r\n", b"0\r\n\r\n", b"x", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
    return prefix + INNER * rng.choice((1, 1, 2, 50))


def chunks_of(body: bytes, rng: random.Random) -> bytes:
    """Return a body as chunks of random sizes, with extensions and trailers."""
    data, at = b"", 0
    while at < len(body):
        piece = body[at : at + rng.choice((1, 7, 40, 4096))]
        at += len(piece)
        size = rng.choice((f"{len(piece):x}", f"{len(piece):X}", f"{len(piece):08x}"))
        extension = rng.choice(("", "", ";a", ";a=b", ';a="b c"', ";" + "x" * 200))
        data += f"{size}{extension}\r\n".encode() + piece + b"\r\n"
    trailer = rng.choice((b"", b"X-Trailer: 1\r\n", b"X-T: 1\r\nX-U: 2\r\n"))
    return data + b"0\r\n" + trailer + b"\r\n"


def right_request(path: bytes, rng: random.Random, extras: Sequence[bytes] = EXTRAS) -> Request:
    """Return a request that is right, however odd."""
    start = rng.choice((b"", b"", b"\r\n"))
    extra = rng.choice(extras)
    if rng.random() < 0.3:
        return Request(
            path, start + b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n" + extra + b"\r\n", b""
        )
    body = body_of(rng)
    target = path
    if rng.random() < 0.3:  # the answer names the model, which does not exist
        target = b"/v1/completions"
        body = b'{"prompt": "x", "model": "%s",\r\n\r\n"x": "%s"}' % (
            path,
            INNER.replace(b"\r\n", b"\\r\\n"),
        )
    line = start + b"POST " + target + b" HTTP/1.1\r\nHost: x\r\n" + JSON + extra
    if rng.random() < 0.5:
        name = rng.choice((b"Content-Length", b"content-length", b"CONTENT-LENGTH"))
        length = rng.choice((f"{len(body)}", f"{len(body):09}", f"  {len(body)}\t")).encode()
        return Request(path, line + name + b":" + length + b"\r\n\r\n", body)
    coding = rng.choice((b"chunked", b"Chunked", b"CHUNKED"))
    head = line + b"Transfer-Encoding: " + coding + b"\r\n\r\n"
    return Request(path, head, chunks_of(body, rng))


def faulty_request(path: bytes, rng: random.Random, name: str | None = None) -> Request:
    """Return a request with a fault, a random one where none is named."""
    name = name or rng.choice(sorted(FAULTS))
    head, body = FAULTS[name](body_of(rng))
    return Request(path, head.replace(b"PATH", path), body, name)
