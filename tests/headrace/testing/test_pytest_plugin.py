"""The plugin as a user's test run has it: in a process of its own, with a server where asked."""

from pathlib import Path

import psutil
import pytest
from testing_page import run_pytest

pytestmark = pytest.mark.slow

TESTS = """
import os
import urllib.request

from headrace.testing import MockReply


def ask(server):
    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    url = f"{server.base_url}/chat/completions"
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return answer.read()


def test_first(headrace_server):
    headrace_server.script([MockReply("scripted"), MockReply("not used")])
    assert b"scripted" in ask(headrace_server)
    assert [request.messages[-1]["content"] for request in headrace_server.requests] == ["Hi"]


def test_second(headrace_server, headrace_url):
    assert headrace_server.requests == []
    assert headrace_server.num_left == 0
    assert b"scripted" not in ask(headrace_server)
    print(f"URL {headrace_url}")
"""


def run_code(folder: Path, code: str, *args: str) -> tuple[int, str]:
    """Run a file of tests as a user does; return the exit status and the output."""
    (folder / "test_user.py").write_text(code)
    return run_pytest(folder, *args)


def servers_of(folder: Path) -> list[str]:
    """Return the processes of servers that a run in a folder has left."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        if (process.info["environ"] or {}).get("PWD_OF_TEST") == str(folder):
            found.append(" ".join(process.info["cmdline"] or []))
    return found


def test_each_test_begins_without_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD_OF_TEST", str(tmp_path))
    status, output = run_code(tmp_path, TESTS, "-W", "error", "-s")
    assert status == 0, output
    assert output.count("URL http://127.0.0.1:") == 1
    assert servers_of(tmp_path) == []


def test_workers_of_xdist_have_a_server_each(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nheadrace_args = --served-model-name tiny\n")
    code = """
import pathlib
import urllib.request

def test_it(headrace_server, worker_id):
    pathlib.Path(worker_id).write_text(headrace_server.url)
    with urllib.request.urlopen(f"{headrace_server.base_url}/models") as page:
        assert b'"id":"tiny"' in page.read()
"""
    status, output = run_code(tmp_path, code, "-n", "2", "--dist", "each")
    assert status == 0, output
    first, second = ((tmp_path / f"gw{worker}").read_text() for worker in range(2))
    assert first != second


def test_failure_shows_the_log_of_the_server(tmp_path: Path) -> None:
    code = "def test_it(headrace_server):\n    assert headrace_server.num_left == 1\n"
    status, output = run_code(tmp_path, code)
    assert status == 1
    assert "headrace server log" in output


def test_wrong_flag_fails_the_test_with_the_reason(tmp_path: Path) -> None:
    code = "def test_it(headrace_url):\n    pass\n"
    status, output = run_code(tmp_path, code, "--headrace-args=--max-num-seqs 0")
    assert status == 1
    assert "--max-num-seqs 0 is too small" in output


def test_run_without_the_fixture_imports_no_server(tmp_path: Path) -> None:
    code = """
import sys

def test_it(request):
    assert request.config.pluginmanager.has_plugin("headrace")
    loaded = {name for name in sys.modules if name.startswith("headrace")}
    assert loaded <= {"headrace", "headrace.testing", "headrace.testing.pytest_plugin"}
    assert not {"torch", "numpy", "msgspec", "httpx"} & set(sys.modules)
"""
    status, output = run_code(tmp_path, code)
    assert status == 0, output
