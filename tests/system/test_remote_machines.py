"""Two machines, one a network namespace: many streams while their link is cut, or drops packets."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from many_streams import NUM_STREAMS, Answer, Listener, answers_alone, read_all
from network_namespace import NetworkNamespace
from remote_nodes import RunningNode
from servers import RunningServer, wait_until
from slow_link import SlowLink
from tiny_models import make_byte_folder

pytestmark = pytest.mark.skipif("REMOTE_MODEL" not in os.environ, reason="long: `make soak`")
FLAGS = ("--kv-cache-dtype", "float32", "--max-num-seqs", "32")
CUT_S = 20.0
RATE = "4mbit"  # of a link that is too narrow for bursts


class Machines:
    """A server here, with an engine of its own and one in a namespace."""

    def __init__(self, folder: Path, namespace: NetworkNamespace) -> None:
        model, key = str(folder / "model"), folder / "key"
        self.node = RunningNode(key, model, *FLAGS, host=namespace.there, under=namespace.under)
        flags = ("--remote-engines", self.node.url, "--engine-key-file", str(key))
        self.head = RunningServer(model, *FLAGS, *flags)
        self.await_health()

    def await_health(self) -> None:
        """Wait until both engines serve."""
        wait_until(lambda: self.health.status_code == 200, "both engines serve")

    @property
    def health(self) -> httpx.Response:
        """What the server tells of its processes."""
        return httpx.get(f"{self.head.url}/health")

    @property
    def num_steps(self) -> int:
        """The steps of the engine in the namespace."""
        told = self.health.json()["processes"]
        (found,) = (one["steps"] for one in told if one["process"] == "engine 1")
        return int(found)

    def close(self) -> None:
        """End both."""
        self.head.close()
        self.node.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("machines")
    make_byte_folder(made / "model")
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Answer]:
    """The answers of a server that is not disturbed."""
    return answers_alone(str(folder / "model"), *FLAGS)


@pytest.fixture(scope="module")
def machines(folder: Path, namespace: NetworkNamespace) -> Iterator[Machines]:
    running = Machines(folder, namespace)
    yield running
    running.close()


def test_a_link_that_is_cut_for_long_fails_no_stream(
    machines: Machines, namespace: NetworkNamespace, expected: list[Answer]
) -> None:
    healings: list[Future[None]] = []

    def cut() -> None:
        assert machines.num_steps
        namespace.cut()
        healings.append(pool.submit(heal, time.monotonic() + CUT_S))

    def heal(after: float) -> None:
        def is_due() -> bool:
            return machines.health.status_code == 503 and time.monotonic() >= after

        try:
            wait_until(is_due, "the engine is missed")
        finally:
            namespace.heal()

    listener = Listener(cut)
    with ThreadPoolExecutor(1) as pool:
        assert read_all(machines.head.url, listener) == expected
        print(f"longest silence of {NUM_STREAMS} streams: {listener.silence_s:.2f} s")
        (healing,) = healings
        healing.result()
    machines.await_health()
    before = machines.num_steps
    assert read_all(machines.head.url, Listener()) == expected
    assert machines.num_steps > before, "it is taken in again"


def test_a_link_that_drops_packets_changes_no_text(
    machines: Machines, namespace: NetworkNamespace, expected: list[Answer]
) -> None:
    namespace.narrow(RATE)
    before, listener = machines.num_steps, Listener()
    assert read_all(machines.head.url, listener) == expected
    assert machines.num_steps > before
    assert namespace.num_dropped > 0
    print(f"{namespace.num_dropped} packets dropped; longest silence {listener.silence_s:.2f} s")


def test_a_slow_link_changes_no_text(
    machines: Machines, slow_link: SlowLink, expected: list[Answer]
) -> None:
    before, listener = machines.num_steps, Listener()
    assert read_all(machines.head.url, listener) == expected
    assert machines.num_steps > before
    assert slow_link.num_dropped > 0
    print(f"{slow_link.num_dropped} packets of {slow_link.num_carried} dropped")
