"""The examples in docstrings and on pages, run against a server."""

import doctest
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
HERE = re.compile(r"http://(127\.0\.0\.1|localhost):8000")


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of a page, which is named from the root, in a language."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_command(command: str, url: str) -> str:
    """Run a shell command against the server at `url`; return its output."""
    done = subprocess.run(
        ["sh", "-c", HERE.sub(url, command)],
        env={**os.environ, "URL": url},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_program(program: str, url: str) -> None:
    """Run Python that asks the server at `url`."""
    exec(compile(HERE.sub(url, program), "an example", "exec"), {"__name__": "examples"})  # noqa: S102


def run_examples(module: ModuleType, **names: Any) -> int:
    """Run the examples that speak of one of `names`; return how many there were."""
    runner = doctest.DocTestRunner()
    ran = 0
    for test in doctest.DocTestFinder().find(module, extraglobs=names):
        source = " ".join(example.source for example in test.examples)
        if any(name in source for name in names):
            runner.run(test)
            ran += len(test.examples)
    assert not runner.summarize(verbose=False).failed
    return ran
