"""The server takes and answers what its own description says, whatever is thrown at it."""

import os
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
FEW = ("--max-examples", "1")  # of each operation, where the budget is too small for more
MAX_TIME = ("--max-time", str(int(SHARE * BUDGET_S)))
HERE = Path(__file__).parent
FUZZ = (
    *("--phases", "coverage,fuzzing", "--checks", "all"),
    *("--seed", str(int(SEED) % 2**32), "--generation-database", "none", "--continue-on-failure"),
    # How long an answer and an example take says how busy the machine is.
    *("--request-timeout", "120", "--suppress-health-check", "too_slow"),
    *("--exclude-path", "/ring/events"),  # its stream has no end
    *("--exclude-path-regex", "lora_adapter|kv/warm"),  # an admin key's: tests/system
    *(FEW if BUDGET_S <= DEFAULT_S else MAX_TIME),
)


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose steps take no time: answers go up to the end of the context."""
    profile = tmp_path_factory.mktemp("profile") / "at_once.json"
    profile.write_text('{"step_ms": [[0, 0]]}')
    engine = ("--engine", "mock", "--mock-profile", str(profile))
    running = RunningServer(*engine, "--max-model-len", "256")
    yield running
    running.close()


def test_the_surface_holds_against_fuzzing(mock: RunningServer) -> None:
    config = ("--config-file", str(HERE / "schemathesis.toml"))
    command = [str(SCHEMATHESIS), *config, "run", f"{mock.url}/openapi.json", *FUZZ]
    hooks = {"SCHEMATHESIS_HOOKS": str(HERE / "schemathesis_hooks.py")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=3600, env=os.environ | hooks
    )
    print(f"replay with ADVERSARY_SEED={SEED}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tested: 20" in done.stdout
    assert httpx.get(f"{mock.url}/health").status_code == 200


def test_every_path_described_is_served_and_no_other_method(mock: RunningServer) -> None:
    paths = httpx.get(f"{mock.url}/openapi.json").json()["paths"]
    for path, operations in paths.items():
        (method,) = operations
        with httpx.stream(method.upper(), mock.url + path) as answer:
            assert answer.status_code != 404
        allowed = "GET, HEAD" if method == "get" else "POST"
        refused = httpx.put(mock.url + path)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
