"""The steps of action.yml, run as a GitHub runner runs them."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from servers import survivors

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ACTION: Any = yaml.safe_load((ROOT / "action.yml").read_text())
BASH = ("bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c")  # a runner's `shell: bash`
TIMEOUT_S = 300


def run_step(name: str, folder: Path, **inputs: str) -> tuple[int, str, dict[str, str]]:
    """Run a step with inputs beside their defaults; return its status, its output and outputs."""
    (step,) = (step for step in ACTION["runs"]["steps"] if step["name"] == name)
    given = {name: field["default"] for name, field in ACTION["inputs"].items()} | inputs
    outputs = folder / "outputs"
    outputs.touch()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "GITHUB_OUTPUT": str(outputs), "RUNNER_TEMP": str(folder)}
    for variable, value in step["env"].items():
        environ[variable] = given[value.removeprefix("${{ inputs.").removesuffix(" }}")]
    done = subprocess.run(
        [*BASH, step["run"]], env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    found = dict(line.split("=", 1) for line in outputs.read_text().splitlines())
    return done.returncode, done.stdout + done.stderr, found


def test_action_starts_a_server_that_takes_scripts(tmp_path: Path) -> None:
    status, output, found = run_step("Start", tmp_path, args="--served-model-name tiny --seed 3")
    assert status == 0, output
    server = psutil.Process(int(found["pid"]))
    ring = [server, *server.children(recursive=True)]
    try:
        assert found["base-url"] == f"{found['url']}/v1"
        assert httpx.get(f"{found['base-url']}/models").json()["data"][0]["id"] == "tiny"
        assert httpx.put(f"{found['url']}/mock/script", json={"rules": []}).status_code == 200
        assert found["url"] in Path(found["log"]).read_text()
    finally:
        server.send_signal(signal.SIGINT)
    assert survivors(ring) == []


def test_action_shows_the_log_of_a_server_that_fails(tmp_path: Path) -> None:
    status, output, found = run_step("Start", tmp_path, args="--max-num-seqs 0")
    assert (status, found) == (1, {})
    assert "--max-num-seqs 0 is too small" in output


def test_action_installs_the_given_release(tmp_path: Path) -> None:
    status, output, _ = run_step("Install", tmp_path, requirement="pytest")  # is there already
    assert status == 0, output
    assert "Requirement already satisfied: pytest" in output


def test_outputs_of_the_action_are_those_of_its_step() -> None:
    (step,) = (step for step in ACTION["runs"]["steps"] if step.get("id") == "start")
    for name, output in ACTION["outputs"].items():
        assert output["value"] == f"${{{{ steps.start.outputs.{name} }}}}"
        assert f'echo "{name}=' in step["run"]
