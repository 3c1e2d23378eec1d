"""Chats of 64 streamed tokens, as many at once as wanted, for some seconds.

By `wrk` if it is installed, since it takes the least of the shared cores. Else by the load
generator of `headrace bench`.
"""

import asyncio
import json
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.connection import Record
from headrace.bench.load import LoadRequest, LoadSender, Target

SCRIPT = Path(__file__).with_name("stream.lua")
PATH = "/v1/chat/completions"
NUM_TOKENS = 64  # of each answer; the script says so too
BODY = json.dumps(
    {
        "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        **{"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True},
    }
).encode()


@dataclass(frozen=True)
class Chats:
    """Results of a load."""

    num_requests: int
    num_failures: int
    seconds: float
    p50_ms: float  # of a request
    p99_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all streams together."""
        return self.num_requests * NUM_TOKENS / self.seconds


def generator() -> str:
    """Return what makes the load."""
    return "wrk" if shutil.which("wrk") else "headrace bench (there is no wrk)"


async def chat(url: str, num_streams: int, seconds: float) -> Chats:
    """Have `num_streams` chats at once, each followed by the next."""
    if not shutil.which("wrk"):
        return summary(await probe(url, num_streams, seconds), seconds)
    command = ["wrk", "-t1", f"-c{num_streams}", f"-d{seconds:.0f}s", "--timeout", "30s"]
    process = await asyncio.create_subprocess_exec(
        *(*command, "-s", str(SCRIPT), url + PATH), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    result = output.decode().rsplit("RESULT ", 1)[-1].split()
    return Chats(int(result[0]), int(result[1]), *map(float, result[2:]))


async def probe(url: str, num_streams: int, seconds: float) -> list[Record]:
    """Have a few chats at once and return when each of their tokens came."""
    sender = LoadSender(Target(url + PATH))
    end = time.monotonic() + seconds

    async def keep_chatting() -> None:
        while (now := time.monotonic()) < end:
            await sender.send(LoadRequest(0, 0.0, BODY), now)

    await asyncio.gather(*(keep_chatting() for _ in range(num_streams)))
    sender.close()
    return sender.records


def summary(records: list[Record], seconds: float) -> Chats:
    """Return what records amount to."""
    took_ms = [1e3 * (record.last - record.sent) for record in records if not record.error]
    cuts = statistics.quantiles(took_ms, n=100)
    num_failures = len(records) - len(took_ms)
    return Chats(len(records), num_failures, seconds, cuts[49], cuts[98])
