"""Texts of Ray's errors become a line each, and addresses without a cluster are refused at once."""

import pytest

from headrace.engine_proc.placement.ray_errors import check_reachable, why_lost
from headrace.errors import ConfigError
from support.ports import reserved_port

DIED = """The actor died unexpectedly before finishing this task.
\tpid: 9637
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits."""
NODE_DIED = """The actor died unexpectedly before finishing this task.
The actor is dead because its node has died. Node Id: 1
\tthe actor's node was terminated unexpectedly: health check failed."""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (DIED, "is lost with its actor on node: its worker process has died"),
        (NODE_DIED, "is lost with its actor on node: its node has died. Node Id: 1"),
        ("x\ny", "is lost with its actor on node: x y"),
        (
            "ModuleNotFoundError: No module named 'headrace'\n",
            "cannot run on node: no module headrace; install the server's headrace there",
        ),
    ],
)
def test_why_an_actor_has_ended_is_one_line(text: str, why: str) -> None:
    assert why_lost(text, "node") == why


def test_an_address_without_a_cluster_is_refused() -> None:
    with reserved_port() as port:
        where = f"127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"^--address {where} cannot be reached: .* start"):
            check_reachable(where, "--address")


@pytest.mark.parametrize("where", ["", "auto"])
def test_other_addresses_are_left_to_ray(where: str) -> None:
    check_reachable(where, "RAY_ADDRESS")


@pytest.mark.parametrize("where", ["local", "ray://127.0.0.1:1"])
def test_a_cluster_that_has_no_node_here_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match=f"^RAY_ADDRESS {where} is of no cluster"):
        check_reachable(where, "RAY_ADDRESS")
