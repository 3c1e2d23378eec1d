"""Many streams at once, and how long each of them is silent."""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from servers import RunningServer

NUM_STREAMS, NUM_TOKENS = 64, 300
NUM_PIECES = 1000  # of all streams, before something happens
TIMEOUT_S = 600


@dataclass(frozen=True)
class Answer:
    """What a stream has said, in all."""

    text: str
    finish_reason: str | None
    num_prompt: int
    num_completion: int


class Listener:
    """Hears the pieces of all streams: acts at one of them, and notes the longest silence.

    It goes on hearing while it acts. Without an action there may be any number of pieces: a server
    that falls behind makes few.
    """

    def __init__(self, action: Callable[[], object] | None = None) -> None:
        self._action = action
        self._actor = ThreadPoolExecutor(1)
        self._acting: Future[object] | None = None
        self._num_left = NUM_PIECES
        self.silence_s = 0.0

    def hear(self, silence_s: float) -> None:
        """Note a piece, and for how long its stream was silent before."""
        self.silence_s = max(self.silence_s, silence_s)
        self._num_left -= 1
        if self._action is not None and not self._num_left:
            self._acting = self._actor.submit(self._action)

    def close(self) -> None:
        """Wait until it has acted, if it does; raise what the action has."""
        if self._action is not None:
            assert self._acting is not None, "there were too few pieces"
            self._acting.result()
        self._actor.shutdown()


async def read(client: httpx.AsyncClient, seed: int, listener: Listener) -> Answer:
    """Return what a stream says, whose last event counts tokens."""
    body: dict[str, Any] = {
        "prompt": f"{seed} Once",
        "seed": seed,
        "temperature": 1,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events, heard_at = list[dict[str, Any]](), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.monotonic()
                listener.hear(now - heard_at if heard_at else 0.0)
                heard_at = now
                events.append(json.loads(line[6:]))
    usage, choices = events[-1]["usage"], [event["choices"][0] for event in events[:-1]]
    return Answer(
        "".join(choice["text"] for choice in choices),
        choices[-1]["finish_reason"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def read_all(url: str, listener: Listener) -> list[Answer]:
    """Return what all streams say, which run at once."""

    async def read_together() -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
            return await asyncio.gather(
                *(read(client, seed, listener) for seed in range(NUM_STREAMS))
            )

    answers = asyncio.run(read_together())
    listener.close()
    return answers


def answers_alone(*flags: str) -> list[Answer]:
    """Return what the streams of a server with these flags say, which nothing disturbs."""
    alone = RunningServer(*flags)
    answers = read_all(alone.url, Listener())
    assert alone.stop() == 0
    return answers
