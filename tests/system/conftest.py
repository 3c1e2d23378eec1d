"""The demo model served for all system tests, its weights in `transformers`, another machine."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from network_namespace import NetworkNamespace, NoNamespace
from ray_nodes import RayCluster
from reference import Expected, generate_expected
from servers import HELD, RunningServer
from slow_link import SlowLink

DELAY_S, LOSS = 0.01, 0.01  # of packets in each direction


@pytest.fixture(scope="session")
def expected() -> list[Expected]:
    """What the server must say, greedily."""
    return generate_expected()


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """A server with two processes of each kind that can have several."""
    running = RunningServer(
        *("--frontend-procs", "2", "--tokenizer-procs", "2", "--detokenizer-procs", "2"),
        *("--dtype", "float32", "--kv-cache-dtype", "float32"),  # exact, as transformers is
        *HELD,
    )
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def namespace() -> Iterator[NetworkNamespace]:
    """Another machine, or the test is skipped."""
    try:
        made = NetworkNamespace()
    except NoNamespace as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def slow_link(namespace: NetworkNamespace) -> Iterator[SlowLink]:
    """The way to that machine, delaying all packets and dropping some; or the test is skipped."""
    with ExitStack() as stack:
        try:
            link = stack.enter_context(namespace.slow(DELAY_S, LOSS))
        except NoNamespace as error:
            pytest.skip(str(error))
        yield link


@pytest.fixture(scope="module")
def cluster(namespace: NetworkNamespace) -> Iterator[RayCluster]:
    """A Ray cluster whose node is on that machine."""
    made = RayCluster(namespace.home, namespace.there, namespace.under)
    yield made
    made.close()
