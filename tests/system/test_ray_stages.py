"""Stages that Ray places: nodes, links and processes die under many streams."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from many_streams import NUM_STREAMS, Answer, Listener, answers_alone, read_all
from network_namespace import NetworkNamespace
from ray_nodes import NUM_CPUS, RayCluster, RayNode, titled
from servers import RunningServer, StartFailed, wait_until
from slow_link import SlowLink
from strangers import knock, scan, tcp_ports
from tiny_models import make_byte_folder

from headrace.exit_status import ExitStatus
from headrace.extras import missing

pytestmark = [
    pytest.mark.skipif("RAY_NODES" not in os.environ, reason="long: `make soak`"),
    pytest.mark.skipif(bool(missing("ray")), reason=missing("ray") or "ray is installed"),
]
FLAGS = ("--kv-cache-dtype", "float32", "--max-num-seqs", "32")
STAGES = ("--pp", "2", "--distributed-executor-backend", "ray")
CUT_S = 15.0
RATE = "4mbit"  # of a link that is too narrow for bursts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ray") / "model"
    make_byte_folder(made, num_hidden_layers=2)
    return made


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answer]:
    """The answers of a server without stages."""
    return answers_alone(str(model), *FLAGS)


def await_nothing_left(cluster: RayCluster) -> None:
    """Wait until all CPUs of the cluster are free, and all placement groups removed."""

    def is_nothing_left() -> bool:
        num_free, states = cluster.left
        return num_free == 2 * NUM_CPUS and set(states) <= {"REMOVED"}

    wait_until(is_nothing_left, "nothing is left in the cluster")


def test_three_stages_on_three_nodes_change_no_text(
    model: Path, cluster: RayCluster, namespace: NetworkNamespace
) -> None:
    """Also where the worker of the last stage dies, and then its node."""
    larger = model.with_name("of three layers")
    make_byte_folder(larger, num_hidden_layers=3)
    expected = answers_alone(str(larger), *FLAGS)
    startings: list[Future[RayNode]] = []
    with ExitStack() as stack:
        node = cluster.new_node(namespace.there_too)
        stack.callback(node.kill)
        flags = (*FLAGS, "--pp", "3", *STAGES[2:])
        server = RunningServer(str(larger), *flags, env=cluster.env)
        stack.callback(server.close)
        check_texts(server, expected)
        found = [*node.processes, *cluster.node_processes]
        (_,), (last,) = (titled(found, f"headrace: worker {stage}") for stage in (1, 2))
        check_texts(server, expected, last.kill)

        def replace() -> None:
            node.kill()
            startings.append(pool.submit(cluster.new_node, namespace.there_too))
            stack.callback(lambda: startings[0].result().kill())

        with ThreadPoolExecutor(1) as pool:
            check_texts(server, expected, replace)
        assert server.stop() == 0
    await_nothing_left(cluster)


def test_a_node_without_memory_for_its_stage_ends_the_server(
    model: Path, cluster: RayCluster
) -> None:
    cluster.kill_node()
    cluster.start_node(memory_bytes=1 << 30)
    flags = ("--kv-cache-memory-bytes", str(4 << 30))
    told = r"worker 1 could not start: at tcp://\S+: .* has 1.0 GiB of memory"
    try:
        with pytest.raises(StartFailed, match=told) as failure:
            RunningServer(str(model), *FLAGS, *STAGES, *flags, env=cluster.env).close()
    finally:
        cluster.kill_node()
        cluster.start_node()
    assert failure.value.exit_status == ExitStatus.BAD_FLAGS
    await_nothing_left(cluster)


@pytest.fixture(scope="module")
def server(model: Path, cluster: RayCluster) -> Iterator[RunningServer]:
    """A server whose second stage is on the node."""
    running = RunningServer(str(model), *FLAGS, *STAGES, env=cluster.env)
    yield running
    assert running.stop() == 0
    await_nothing_left(cluster)


def status(server: RunningServer) -> int:
    """Return the status of the server's health."""
    return httpx.get(f"{server.url}/health").status_code


def check_texts(
    server: RunningServer, expected: list[Answer], action: Callable[[], None] | None = None
) -> None:
    """Read all streams, which are as expected, while something may happen."""
    wait_until(lambda: status(server) == 200, "all stages serve", 240)
    listener = Listener(action)
    assert read_all(server.url, listener) == expected
    print(f"longest silence of {NUM_STREAMS} streams: {listener.silence_s:.2f} s")


def test_stages_on_two_nodes_change_no_text(
    server: RunningServer, cluster: RayCluster, expected: list[Answer]
) -> None:
    for title in ("headrace: stage", "headrace: worker 1"):
        assert titled(cluster.node_processes, title)
    check_texts(server, expected)


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        ("headrace: worker 1", signal.SIGKILL),
        ("headrace: stage", signal.SIGKILL),
        ("ray::StageActor", signal.SIGKILL),
        ("headrace: worker 1", signal.SIGSTOP),  # a watchdog ends it after 8 s,
        ("headrace: stage", signal.SIGSTOP),  # and that of its machine this one after 60 s
    ],
)
def test_streams_go_on_when_a_process_of_a_stage_ends_or_stops(
    server: RunningServer,
    cluster: RayCluster,
    expected: list[Answer],
    victim: str,
    how: signal.Signals,
) -> None:
    wait_until(lambda: status(server) == 200, "all stages serve", 240)
    (process,) = titled(cluster.processes, victim)
    check_texts(server, expected, lambda: process.send_signal(how))
    assert not process.is_running()


@pytest.mark.parametrize(
    "victim", ["worker 0", "worker 1", "engine", "placement"], ids=lambda victim: f"server-{victim}"
)
def test_streams_go_on_when_a_process_of_the_server_dies(
    server: RunningServer, expected: list[Answer], victim: str
) -> None:
    wait_until(lambda: status(server) == 200, "all stages serve", 240)
    process = server.processes[f"headrace: {victim}"]
    check_texts(server, expected, process.kill)
    assert not process.is_running()


def test_streams_go_on_when_the_node_of_a_stage_comes_back(
    server: RunningServer, cluster: RayCluster, expected: list[Answer]
) -> None:
    def replace() -> None:
        cluster.kill_node()
        startings.append(pool.submit(cluster.start_node))

    startings: list[Future[None]] = []
    with ThreadPoolExecutor(1) as pool:
        check_texts(server, expected, replace)
        startings[0].result()


def test_streams_go_on_when_the_link_to_a_stage_is_cut(
    server: RunningServer, namespace: NetworkNamespace, expected: list[Answer]
) -> None:
    def cut() -> None:
        namespace.cut()
        healings.append(pool.submit(heal, time.monotonic() + CUT_S))

    def heal(after: float) -> None:
        try:
            wait_until(
                lambda: status(server) == 503 and time.monotonic() >= after, "the stage is missed"
            )
        finally:
            namespace.heal()

    healings: list[Future[None]] = []
    with ThreadPoolExecutor(1) as pool:
        check_texts(server, expected, cut)
        healings[0].result()


def test_a_narrow_link_to_a_stage_changes_no_text(
    server: RunningServer, namespace: NetworkNamespace, expected: list[Answer]
) -> None:
    wait_until(lambda: status(server) == 200, "all stages serve", 240)
    namespace.narrow(RATE)
    try:
        check_texts(server, expected)
    finally:
        namespace.widen()


def test_a_slow_link_to_a_stage_changes_no_text(
    server: RunningServer, slow_link: SlowLink, expected: list[Answer]
) -> None:
    check_texts(server, expected)
    assert slow_link.num_dropped > 0
    print(f"{slow_link.num_dropped} packets of {slow_link.num_carried} dropped")


def test_strangers_disturb_no_stage_on_a_node(
    server: RunningServer,
    cluster: RayCluster,
    namespace: NetworkNamespace,
    expected: list[Answer],
    tmp_path: Path,
) -> None:
    wait_until(lambda: status(server) == 200, "all stages serve", 240)
    (port,) = tcp_ports(titled(cluster.node_processes, "headrace: "))
    before = titled(cluster.node_processes, "headrace: ")

    def come() -> None:
        scan(namespace.there, port)
        knock(namespace.there, port, tmp_path)

    check_texts(server, expected, come)
    assert titled(cluster.node_processes, "headrace: ") == before


class WaitingServer(RunningServer):
    """A server that has no node for one of its stages."""

    ready = re.compile(r"(waits for 2 CPUs of a node of its own, .*lower --pp)")


def test_stages_that_have_no_node_are_told_of(model: Path, cluster: RayCluster) -> None:
    flags = ("--pp", "3", "--distributed-executor-backend", "ray")
    more_layers = model.with_name("larger")
    make_byte_folder(more_layers, num_hidden_layers=3)
    server = WaitingServer(str(more_layers), *FLAGS, *flags, env=cluster.env)
    assert server.stop() == 0
