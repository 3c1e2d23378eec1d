"""A KV store on another machine: it has prefixes that its engine's pages have no room for."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from remote_nodes import RunningNode
from servers import RunningServer, wait_until
from tiny_models import make_byte_folder

pytestmark = pytest.mark.skipif("REMOTE_MODEL" not in os.environ, reason="long: `make soak`")
FLAGS = ("--max-num-seqs", "2", "--max-model-len", "224", "--kv-cache-memory-bytes", "160000")
STORE = ("--kv-store-bytes", "2000000")
# Of a model whose pages take far less time to fetch than to compute.
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 16,
}
NUM_CHARACTERS = 200  # of a prompt: the pool has room for one or two
NUM_OTHERS = 3  # prompts, after which nothing of the one before them is in the pool
PREFIX_ROUTED = "routing_prefix_requests_total"


class Machines:
    """A server whose own engine caches nothing, and an engine with a store."""

    def __init__(self, folder: Path) -> None:
        model, key = str(folder / "model"), folder / "key"
        make_byte_folder(folder / "model", **SIZES)
        self.node = RunningNode(key, model, *FLAGS, *STORE)
        flags = ("--remote-engines", self.node.url, "--engine-key-file", str(key))
        self.head = RunningServer(model, *FLAGS, "--no-enable-prefix-caching", *flags)
        self.await_health()
        self._num_asked = 0

    def await_health(self) -> None:
        """Wait until both engines serve."""
        wait_until(lambda: self.status == 200, "both engines serve")

    def ask(self, number: int) -> tuple[int, int]:
        """Return which engine has computed a prompt, and how many of its tokens were cached."""
        before = self._steps
        letters = random.Random(number).choices("abcdefgh", k=NUM_CHARACTERS)
        body = {"prompt": "".join(letters), "max_tokens": 1, "ignore_eos": True}
        reply = httpx.post(f"{self.head.url}/v1/completions", json=body)
        wait_until(lambda: self._steps != before, "the step is counted")
        (engine,) = (i for i, steps in enumerate(self._steps) if steps != before[i])
        return engine, reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def ask_remote(self, number: int) -> int:
        """Ask until the remote engine has computed a prompt; return how much was cached then."""
        engine, num_cached = self.ask(number)
        while engine == 0:
            assert num_cached == 0
            engine, num_cached = self.ask(number)
        return num_cached

    def push_out(self) -> None:
        """Have the remote engine's pool hold nothing of what it has."""
        for _ in range(NUM_OTHERS):
            self._num_asked += 1
            assert self.ask_remote(self._num_asked) == 0

    @property
    def status(self) -> int:
        """Whether all serve, as a status of HTTP."""
        return httpx.get(f"{self.head.url}/health").status_code

    @property
    def _steps(self) -> list[int]:
        told = httpx.get(f"{self.head.url}/health").json()["processes"]
        return [one["steps"] for one in told if one["process"].startswith("engine")]

    def close(self) -> None:
        """End both."""
        self.head.close()
        self.node.close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    running = Machines(tmp_path)
    yield running
    running.close()


def test_prefixes_come_from_the_store_of_a_remote_engine(machines: Machines) -> None:
    """Also after the engine's death. Requests are routed there for what its store has.

    A busy machine may compute a prefix that it has, where it takes that to be quicker.
    """
    assert machines.ask_remote(0) == 0

    def comes_from_store() -> bool:
        machines.push_out()
        before = machines.head.metric(PREFIX_ROUTED)
        engine, num_cached = machines.ask(0)
        return engine == 1 and num_cached > 0 and machines.head.metric(PREFIX_ROUTED) > before

    wait_until(comes_from_store, "it is stored before it is pushed out")
    process = machines.node.ring["headrace: engine"]
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: machines.status == 503, "the engine is missed")
    machines.await_health()
    wait_until(comes_from_store, "its successor's store has it")
