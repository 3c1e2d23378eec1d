"""docs/testing.md's examples of LangChain, LiteLLM and Vercel's SDK; action.yml by its schema."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import clients
import pytest
import yaml
from examples import ROOT, blocks
from testing_page import ECOSYSTEM, PAGE, run_tests_of

from headrace.testing import ScriptedServer

Ecosystem = Callable[[], AbstractContextManager[None]]


@pytest.mark.parametrize("package", ECOSYSTEM)
def test_example_of_a_library_passes(ecosystem: Ecosystem, tmp_path: Path, package: str) -> None:
    assert "1 passed" in run_tests_of(tmp_path, package)


def test_example_of_vercels_sdk_passes(ecosystem: Ecosystem, tmp_path: Path) -> None:
    (program,) = blocks(PAGE, "js")
    with ecosystem():
        folder = clients.install(clients.NPM)
    (tmp_path / "example.cjs").write_text(program)
    with ScriptedServer() as server:
        modules = str(folder / "node_modules")
        environ = clients.own_environ(NODE_PATH=modules, HEADRACE_URL=server.url)
        command = ["node", str(tmp_path / "example.cjs")]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=clients.TIMEOUT_S
        )
    assert done.returncode == 0, done.stderr


def test_action_and_its_example_follow_the_schemas(ecosystem: Ecosystem, tmp_path: Path) -> None:
    (example,) = blocks(PAGE, "yaml")
    job: Any = {"runs-on": "ubuntu-latest"} | yaml.safe_load(example)
    workflow = tmp_path / "workflow.json"
    workflow.write_text(json.dumps({"on": "push", "jobs": {"test": job}}))
    for schema, file in (("github-actions", ROOT / "action.yml"), ("github-workflows", workflow)):
        check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
        done = subprocess.run([*check, str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
