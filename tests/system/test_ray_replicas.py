"""Replicas that Ray places: nodes, links and processes die under many streams."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from many_streams import NUM_STREAMS, Answer, Listener, answers_alone, read_all
from network_namespace import NetworkNamespace
from ray_nodes import NUM_CPUS, RayCluster, titled
from servers import RunningServer, survivors, wait_until
from slow_link import SlowLink
from strangers import knock, scan, tcp_ports
from tiny_models import make_byte_folder

from headrace.client.client import Client
from headrace.extras import missing

pytestmark = [
    pytest.mark.skipif("RAY_NODES" not in os.environ, reason="long: `make soak`"),
    pytest.mark.skipif(bool(missing("ray")), reason=missing("ray") or "ray is installed"),
]
FLAGS = ("--kv-cache-dtype", "float32", "--max-num-seqs", "32")
KEY = "operator"
CUT_S = 20.0
# Of a stream, where another engine can go on. It is 3 s where nothing else uses the cores.
MAX_SILENCE_S = 15.0
PLACED_S = 30.0  # as long as all engines are missing
RATE = "4mbit"  # of a link that is too narrow for bursts


class Fleet:
    """A server whose two engines are on two nodes."""

    def __init__(self, model: Path, cluster: RayCluster) -> None:
        flags = ("--data-parallel-size", "2", "--data-parallel-backend", "ray")
        admin = ("--admin-api-key", KEY)
        self.head = RunningServer(str(model), *FLAGS, *flags, *admin, env=cluster.env)
        self.await_health()

    def await_health(self) -> None:
        """Wait until both engines serve."""
        wait_until(lambda: self.health.status_code == 200, "both engines serve", 240)

    @property
    def health(self) -> httpx.Response:
        """What the server tells of its processes."""
        return httpx.get(f"{self.head.url}/health")

    def told(self, role: str) -> list[dict[str, Any]]:
        """What the server tells of the processes of a role."""
        processes = self.health.json()["processes"]
        return [one for one in processes if one["process"].startswith(role)]

    def want(self, count: int) -> None:
        """Ask for so many engines."""
        with Client(self.head.url, api_key=KEY) as client:
            assert client.scale(count).replicas == count

    def has(self, count: int) -> bool:
        """Whether there are so many engines, all of which serve, and no others."""
        with Client(self.head.url, api_key=KEY) as client:
            (found,) = client.replicas()
        return found.replicas == found.ready == count and not found.leaving

    @property
    def steps(self) -> list[int]:
        """The steps of all engines since they were started."""
        return [one["steps"] for one in self.told("engine")]

    @property
    def placed(self) -> int:
        """How many engines are on nodes."""
        (placement,) = self.told("placement")
        return int(placement["placed"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ray") / "model"
    make_byte_folder(made)
    return made


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answer]:
    """The answers of a server that is not disturbed."""
    return answers_alone(str(model), *FLAGS)


@pytest.fixture
def fleet(model: Path, cluster: RayCluster) -> Iterator[Fleet]:
    """A server. Nothing of it is left in the cluster when it has ended."""
    cluster.revive_node()
    running = Fleet(model, cluster)
    yield running
    running.head.close()
    await_nothing_left(cluster)


def await_nothing_left(cluster: RayCluster) -> None:
    """Wait until all CPUs of the cluster are free, and all placement groups removed."""

    def is_nothing_left() -> bool:
        num_free, states = cluster.left
        return num_free == 2 * NUM_CPUS and set(states) <= {"REMOVED"}

    wait_until(is_nothing_left, "nothing is left in the cluster")


def check_texts(
    fleet: Fleet, expected: list[Answer], listener: Listener, max_silence_s: float = MAX_SILENCE_S
) -> None:
    """Read all streams, which are as expected, and none of which is silent for long."""
    assert read_all(fleet.head.url, listener) == expected
    print(f"longest silence of {NUM_STREAMS} streams: {listener.silence_s:.2f} s")
    assert listener.silence_s <= max_silence_s


def check_both_serve(fleet: Fleet, expected: list[Answer]) -> None:
    """Wait for both engines, and see that both compute."""
    fleet.await_health()
    before = fleet.steps
    check_texts(fleet, expected, Listener())
    after = fleet.steps
    assert all(late > early for early, late in zip(before, after, strict=True))


def test_streams_go_on_when_a_node_dies_and_it_comes_back(
    fleet: Fleet, cluster: RayCluster, expected: list[Answer]
) -> None:
    check_both_serve(fleet, expected)
    check_texts(fleet, expected, Listener(cluster.kill_node))
    wait_until(lambda: fleet.health.status_code == 503, "the engine is missed")
    assert httpx.get(f"{fleet.head.url}/ready").status_code == 200
    cluster.start_node()
    check_both_serve(fleet, expected)


def test_streams_go_on_when_the_link_of_a_node_is_cut(
    fleet: Fleet, namespace: NetworkNamespace, expected: list[Answer]
) -> None:
    healings: list[Future[None]] = []

    def cut() -> None:
        namespace.cut()
        healings.append(pool.submit(heal, time.monotonic() + CUT_S))

    def heal(after: float) -> None:
        try:
            wait_until(
                lambda: fleet.health.status_code == 503 and time.monotonic() >= after,
                "the engine is missed",
            )
        finally:
            namespace.heal()

    with ThreadPoolExecutor(1) as pool:
        check_texts(fleet, expected, Listener(cut))
        (healing,) = healings
        healing.result()
    check_both_serve(fleet, expected)


def test_a_narrow_link_that_drops_packets_changes_no_text(
    fleet: Fleet, namespace: NetworkNamespace, expected: list[Answer]
) -> None:
    namespace.narrow(RATE)
    try:
        check_texts(fleet, expected, Listener())
        assert namespace.num_dropped > 0
    finally:
        namespace.widen()


def test_a_slow_link_changes_no_text(
    fleet: Fleet, slow_link: SlowLink, expected: list[Answer]
) -> None:
    check_both_serve(fleet, expected)
    assert slow_link.num_dropped > 0
    print(f"{slow_link.num_dropped} packets of {slow_link.num_carried} dropped")


def scale(fleet: Fleet, count: int, expected: list[Answer]) -> None:
    """Have so many engines while streams run, until there are; all streams are as expected."""
    check_texts(fleet, expected, Listener(lambda: fleet.want(count)))
    while not fleet.has(count):
        check_texts(fleet, expected, Listener())


def test_engines_come_and_go_on_nodes_while_streams_run(
    fleet: Fleet, cluster: RayCluster, namespace: NetworkNamespace, expected: list[Answer]
) -> None:
    node = cluster.new_node(namespace.there_too)
    try:
        scale(fleet, 3, expected)
        before = fleet.steps
        check_texts(fleet, expected, Listener())
        assert all(late > early for early, late in zip(before, fleet.steps, strict=True))
        actors = titled([*cluster.processes, *node.processes], "ray::EngineActor")
        assert len(actors) == 3 and titled(node.processes, "headrace: engine")
        scale(fleet, 1, expected)
        wait_until(lambda: cluster.left[0] == 2 * NUM_CPUS, "two engines have left the cluster")
        assert cluster.left[1].count("CREATED") == 1
        assert sum(actor.is_running() for actor in actors) == 1
        assert len(titled([*cluster.processes, *node.processes], "headrace: engine")) == 1
        check_texts(fleet, expected, Listener())
        assert fleet.health.status_code == 200
        assert len(fleet.steps) == fleet.placed == 1
    finally:
        node.kill()


def test_sighup_renews_engines_on_nodes_while_streams_run(
    fleet: Fleet, cluster: RayCluster, expected: list[Answer]
) -> None:
    before = cluster.engine_processes
    supervisor = fleet.head.ring["headrace: supervisor"]
    check_texts(fleet, expected, Listener(lambda: supervisor.send_signal(signal.SIGHUP)))
    while any(process.is_running() for process in before):
        check_texts(fleet, expected, Listener())
    check_both_serve(fleet, expected)
    assert fleet.placed == 2


def test_strangers_disturb_no_engine_on_a_node(
    fleet: Fleet,
    cluster: RayCluster,
    namespace: NetworkNamespace,
    expected: list[Answer],
    tmp_path: Path,
) -> None:
    (port,) = tcp_ports(titled(cluster.node_processes, "headrace: "))
    steps, restarts = fleet.steps, [one["restarts"] for one in fleet.told("engine")]

    def come() -> None:
        scan(namespace.there, port)
        knock(namespace.there, port, tmp_path)

    check_texts(fleet, expected, Listener(come))
    assert all(late > early for early, late in zip(steps, fleet.steps, strict=True))
    assert [one["restarts"] for one in fleet.told("engine")] == restarts


def await_replacement(fleet: Fleet, count: int) -> None:
    """Wait until so many processes in the seats of engines have been replaced."""
    wait_until(
        lambda: sum(one["restarts"] for one in fleet.told("engine")) >= count,
        "the engine is missed",
    )


@pytest.mark.parametrize("victim", ["ray::EngineActor", "headrace: supervisor"])
def test_an_engine_is_placed_again_when_its_process_dies(
    fleet: Fleet, expected: list[Answer], cluster: RayCluster, victim: str
) -> None:
    victims = titled(cluster.processes, victim)
    assert len(victims) == 2
    check_texts(fleet, expected, Listener(victims[0].kill))
    await_replacement(fleet, 1)
    check_both_serve(fleet, expected)


def test_engines_are_placed_again_when_placement_dies(
    fleet: Fleet, expected: list[Answer], cluster: RayCluster
) -> None:
    placement = fleet.head.ring["headrace: placement"]
    check_texts(fleet, expected, Listener(placement.kill), PLACED_S)
    await_replacement(fleet, 2)
    check_both_serve(fleet, expected)
    assert fleet.placed == 2


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_of_a_server_is_left_in_the_cluster(
    model: Path, cluster: RayCluster, how: signal.Signals
) -> None:
    fleet = Fleet(model, cluster)
    left = [*fleet.head.processes.values(), *cluster.engine_processes]
    os.kill(fleet.head.process.pid, how)
    assert fleet.head.wait() == (0 if how == signal.SIGINT else -how)
    assert not survivors(left)
    await_nothing_left(cluster)


def test_engines_that_have_no_room_are_told_of(model: Path, cluster: RayCluster) -> None:
    flags = ("--data-parallel-size", "3", "--data-parallel-backend", "ray")
    server = RunningServer(str(model), *FLAGS, *flags, env=cluster.env)
    deadline = time.monotonic() + 60
    while "waits for 2 CPUs of one node" not in server.log:
        server.read_log(deadline)
    assert "lower --data-parallel-size" in server.log
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert server.stop() == 0
    await_nothing_left(cluster)
