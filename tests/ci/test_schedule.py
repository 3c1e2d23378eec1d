"""Which tests one process runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import schedule
from schedule import RULES, SYSTEM, scope_of, shares_fixtures


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def test_it(server: RunningServer) -> None:\n", True),
        ("async def test_it(\n    expected: list[Expected],\n) -> None:\n", True),
        ("@pytest.fixture\ndef client(server: RunningServer) -> Client:\n", True),
        ("def ask(server: RunningServer) -> str:\n", False),
        ("def test_it(own_server: RunningServer) -> None:\n", False),
        ("def server() -> Server:\ndef test_it(server: RunningServer) -> None:\n", False),
    ],
)
def test_files_that_share_a_server_are_known(source: str, expected: bool) -> None:
    assert shares_fixtures(source) == expected


def test_files_with_servers_of_their_own_run_anywhere() -> None:
    assert (
        scope_of("tests/system/test_apis.py") == scope_of("tests/system/test_engine.py") == SYSTEM
    )
    assert scope_of("tests/system/test_recovery.py") == "tests/system/test_recovery.py"
    assert len({scope_of(file) for file in RULES}) == 1


def test_tests_after_a_fatal_one_run_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pathlib, schedule\n"
        "schedule.ROOT = pathlib.Path(__file__).parent\n"
        "def pytest_xdist_make_scheduler(config, log): return schedule.Schedule(config, log)\n"
    )
    (tmp_path / "test_a.py").write_text(
        "import os, signal\ndef test_fatal(): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for name in "bc":
        (tmp_path / f"test_{name}.py").write_text("def test_sound(): pass\n")
    run = subprocess.run(
        (sys.executable, "-m", "pytest", "-p", "xdist", "-n", "1", "--rootdir", ".", "."),
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(Path(schedule.__file__).parent),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "1 failed, 2 passed" in run.stdout
    assert run.stdout.count("node down") == 1
