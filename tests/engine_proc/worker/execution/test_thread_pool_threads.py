"""Threads of a step do not race, lose no wake, and sleep where they wait for long."""

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CSRC = Path(__file__).parents[4] / "csrc"
SOURCES = (CSRC / "cpu" / "thread_pool.cpp", CSRC / "futex.cpp")
DRIVER = Path(__file__).with_name("thread_pool_threads.cpp")
FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread")
DEADLINE_S = 600.0
STEPS = 150
STALLS_MS = 200  # threads stand still in two places


def test_threads_of_a_step_meet_and_sleep(tmp_path: Path) -> None:
    program = tmp_path / "threads"
    command = ["g++", *FLAGS, f"-I{CSRC}", DRIVER, *SOURCES, "-o", program]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    for num_threads in (2, 4):
        result = subprocess.run(
            [program, str(num_threads), str(STEPS)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"{STEPS} of {STEPS} steps are right" in result.stdout
        waited = re.search(r"^(\d+) ms of waiting$", result.stdout, re.MULTILINE)
        assert waited and int(waited[1]) < STALLS_MS / 20, "a thread that yields takes all of it"
