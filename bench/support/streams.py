"""Completion requests that stream, all at once, and when their tokens came.

A load generator that shares the machine with its target must cost next to nothing. Bytes are
stamped as they arrive and parsed only after the last stream has ended.
"""

import asyncio
import itertools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

TOKEN = b'"text"'  # one in each event with tokens
USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')


@dataclass(frozen=True)
class Stream:
    """One answer. Times are of one clock, in seconds."""

    sent: float
    first: float  # its first token came
    last: float
    num_tokens: int
    num_first: int  # tokens that came with the first
    text: str
    silence: float  # the longest between two tokens
    events: list[tuple[float, int]]  # when tokens came, and how many

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (self.num_tokens - self.num_first) / (self.last - self.first)

    def num_after(self, time: float) -> int:
        """The tokens that came later than that."""
        return sum(count for at, count in self.events if at > time)


class Exchange(asyncio.Protocol):
    """One connection: a request written, an answer read to its end."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._pieces: list[tuple[float, bytes]] = []
        self._sent = 0.0
        self.done: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))

    def connection_lost(self, _error: Exception | None) -> None:
        try:
            self.done.set_result(self._stream())
        except Exception as error:
            self.done.set_exception(error)

    def _stream(self) -> Stream:
        body = b"".join(data for _, data in self._pieces)
        usage = USAGE.search(body)
        if not body.startswith(b"HTTP/1.1 200") or usage is None:
            raise RuntimeError(f"not a complete answer: {body[-1000:].decode(errors='replace')}")
        tokens = [(at, data.count(TOKEN)) for at, data in self._pieces if TOKEN in data]
        events = [json.loads(line[6:]) for line in body.splitlines() if line[:7] == b"data: {"]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        (first, num_first), (last, _) = tokens[0], tokens[-1]
        gaps = (later - earlier for (earlier, _), (later, _) in itertools.pairwise(tokens))
        silence = max(gaps, default=0.0)
        return Stream(self._sent, first, last, int(usage[1]), num_first, text, silence, tokens)


async def exchange_all(url: str, bodies: list[dict[str, Any]]) -> list[Stream]:
    """Send all requests at once, each on a connection of its own."""
    where = urlsplit(url)
    loop = asyncio.get_running_loop()
    answers = []
    for body in bodies:
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        make_exchange = partial(Exchange, head.encode() + data)
        _, exchange = await loop.create_connection(
            make_exchange, where.hostname or "", where.port or 80
        )
        answers.append(exchange.done)
    return list(await asyncio.gather(*answers))


def complete(
    url: str,
    prompts: Sequence[list[int] | str],
    max_tokens: int,
    temperature: float = 0.0,
    models: Sequence[str] = (),
) -> list[Stream]:
    """Continue all prompts at once by exactly `max_tokens` tokens each, greedily by default.

    Args:
        models: that prompts name by turns; none name none.
    """
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": max_tokens}
    options |= {"temperature": temperature, "seed": 0}
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [{"prompt": prompt, **options} for prompt in prompts]
    for i, body in enumerate(bodies if models else ()):
        body["model"] = models[i % len(models)]
    streams = asyncio.run(exchange_all(url, bodies))
    assert all(stream.num_tokens == max_tokens for stream in streams)
    return streams


def decode_rate(streams: list[Stream]) -> float:
    """Return tokens per second of all streams together, first tokens not counted."""
    return sum(stream.rate for stream in streams)


def full_rate(streams: list[Stream]) -> float:
    """Return tokens per second while all streams decode: no prompt is left, and none has ended.

    Events count as tokens, so texts have to be of tokens that each have text.
    """
    begin, end = max(one.first for one in streams), min(one.last for one in streams)
    if begin >= end:
        raise ValueError(
            f"of {len(streams)} streams one ends before another begins: ask for more tokens"
        )
    return sum(one.num_after(begin) - one.num_after(end) for one in streams) / (end - begin)
