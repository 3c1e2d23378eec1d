"""The files that `make test-fast` leaves out, known without importing them.

These are system tests, adversaries, the ecosystem, GPU kernels and tests with sanitizers. So is
every file that loads torch or transformers, directly or by a module of tests/support. A single test
that starts a server, compiles or takes seconds has the marker `slow`. One that lacks it fails: the
interpreter's audit events tell what it does.
"""

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parent
FOLDERS = {"system", "adversary", "ecosystem", "real_models", "cuda"}
SLOW_IMPORTS = {
    "torch",
    "transformers",
    "sentence_transformers",
    "torch_executor",
    "sanitized",  # compiles
    "gpu_threads",  # compiles
}
HEAVY = {"torch", "transformers", "sentence_transformers"}
DEEDS = {  # of programs and modules in the command of a process
    **dict.fromkeys(
        ("launch_server", "headrace.launch_server", "headrace.launch.embedded"), "starts a server"
    ),
    **dict.fromkeys(("c++", "g++", "gcc", "cc", "clang++", "nvcc"), "compiles"),
}
IMPORT = re.compile(r"^\s*(?:from|import) ([\w.]+)", re.MULTILINE)


@functools.cache
def loads_slowly(path: Path) -> bool:
    """Whether a file, or a module of tests/support that it imports, has one of `SLOW_IMPORTS`."""
    names = {part for name in IMPORT.findall(path.read_text()) for part in name.split(".")}
    support = [module for name in names if (module := SUPPORT / f"{name}.py").is_file()]
    return bool(names & SLOW_IMPORTS) or any(map(loads_slowly, support))


def is_left_out(path: Path) -> bool:
    """Whether `make test-fast` leaves a file or a folder out."""
    return path.name in FOLDERS if path.is_dir() else path.suffix == ".py" and loads_slowly(path)


def why_slow(event: str, args: tuple[Any, ...]) -> str:
    """Return the reason why an audit event has no place in a unit test, or nothing."""
    if event == "exec":  # of a module that is imported, by whatever way
        folder, file = os.path.split(args[0].co_filename)
        package = os.path.basename(folder)
        return f"imports {package}" if file == "__init__.py" and package in HEAVY else ""
    if event == "subprocess.Popen":
        names = (os.path.basename(os.fsdecode(word)) for word in args[1])
        return next((DEEDS[name] for name in names if name in DEEDS), "")
    return ""


def refuse_slow(event: str, args: tuple[Any, ...]) -> None:
    """Fail the test that does what unit tests do not; an audit hook of `make test-fast`."""
    if why := why_slow(event, args):
        pytest.fail(f"a unit test {why}; give it the marker `slow`")
