"""The examples of docs/testing.md, run as a user has them: files of tests in a process."""

import os
import subprocess
import sys
from pathlib import Path

from examples import blocks

PAGE = "docs/testing.md"
TIMEOUT_S = 600
ECOSYSTEM = ("langchain_openai", "litellm")  # which `make ecosystem` installs
LEFT_OUT = ("no:cacheprovider", "no:schemathesis", "no:asyncio")


def run_pytest(folder: Path, *args: str) -> tuple[int, str]:
    """Run the tests in a folder; return the exit status and the output."""
    command = [sys.executable, "-m", "pytest", *(arg for name in LEFT_OUT for arg in ("-p", name))]
    environ = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [*command, *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environ,
    )
    return done.returncode, done.stdout + done.stderr


def run_tests_of(folder: Path, package: str = "") -> str:
    """Run the page's tests that import a package of `ECOSYSTEM`, or none; return the output."""
    fixture, *tests = (block for block in blocks(PAGE, "python") if "ScriptedServer" not in block)
    (folder / "conftest.py").write_text(fixture)
    for place, test in enumerate(tests):
        if next((name for name in ECOSYSTEM if name in test), "") == package:
            (folder / f"test_{place}.py").write_text(test)
    status, output = run_pytest(folder)
    assert status == 0, output
    return output


def program() -> str:
    """Return the page's program without pytest."""
    (found,) = (block for block in blocks(PAGE, "python") if "ScriptedServer" in block)
    return found
