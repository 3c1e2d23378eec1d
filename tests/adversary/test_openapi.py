"""The server takes and answers what its own description says, whatever is thrown at it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from attack_rounds import BUDGET_S, DEFAULT_S, SEED
from servers import RunningServer

SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"
SHARE = 0.25  # of the budget
FEW = ("--max-examples", "6")  # of each operation, where the budget is too small for more
MAX_TIME = ("--max-time", str(int(SHARE * BUDGET_S)))
# A schema cannot say all that a 400 can: that a model has no embeddings, or a prompt is too long.
EXCLUDED = "positive_data_acceptance"
FUZZ = (
    *("--phases", "coverage,fuzzing", "--checks", "all", "--exclude-checks", EXCLUDED),
    *("--seed", str(int(SEED) % 2**32), "--generation-database", "none", "--continue-on-failure"),
    # How long an answer and an example take says how busy the machine is.
    *("--request-timeout", "120", "--suppress-health-check", "too_slow"),
    *(FEW if BUDGET_S <= DEFAULT_S else MAX_TIME),
)


@pytest.fixture(scope="module")
def mock() -> Iterator[RunningServer]:
    running = RunningServer("--engine", "mock", "--max-model-len", "512")
    yield running
    running.close()


def test_the_surface_holds_against_fuzzing(mock: RunningServer) -> None:
    command = [str(SCHEMATHESIS), "run", f"{mock.url}/openapi.json", *FUZZ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    print(f"replay with ADVERSARY_SEED={SEED}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tested: 22" in done.stdout
    assert httpx.get(f"{mock.url}/health").status_code == 200


def test_every_path_described_is_served_and_no_other_method(mock: RunningServer) -> None:
    paths = httpx.get(f"{mock.url}/openapi.json").json()["paths"]
    for path, operations in paths.items():
        (method,) = operations
        assert httpx.request(method.upper(), mock.url + path).status_code != 404
        allowed = "GET, HEAD" if method == "get" else "POST"
        refused = httpx.put(mock.url + path)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
