"""The choice of files for `make test-fast`."""

from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from unit_tests import is_left_out, refuse_slow


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import numpy as np\n", False),
        ("import torch\n", True),
        ("from transformers import AutoModel\n", True),
        ("from tiny_vision import picture\n", True),  # a module of tests/support that loads torch
        ("from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor\n", True),
        ("def test() -> None:\n    import torch\n", True),
        ('TEXT = "nothing but torch"\n', False),
    ],
)
def test_file_that_loads_torch_is_left_out(tmp_path: Path, source: str, expected: bool) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(source)
    assert is_left_out(path) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("system", True), ("cuda", True), ("frontend", False)]
)
def test_folder_is_left_out_by_name(tmp_path: Path, name: str, expected: bool) -> None:
    folder = tmp_path / name
    folder.mkdir()
    assert is_left_out(folder) == expected


def code_of(package: str) -> CodeType:
    """Return what is executed when a package is imported."""
    return compile("", f"/site-packages/{package}/__init__.py", "exec")


@pytest.mark.parametrize(
    ("event", "args", "why"),
    [
        ("exec", (code_of("torch"),), "imports torch"),
        ("exec", (code_of("transformers"),), "imports transformers"),
        ("subprocess.Popen", ("x", ["/venv/bin/launch_server", "--port", "0"]), "starts a server"),
        ("subprocess.Popen", ("x", ["python", "-m", "headrace.launch_server"]), "starts a server"),
        ("subprocess.Popen", ("x", ["g++", Path("x.cpp")]), "compiles"),
    ],
)
def test_unit_test_that_does_more_fails(event: str, args: tuple[Any, ...], why: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=f"a unit test {why}; give it the marker"):
        refuse_slow(event, args)


@pytest.mark.parametrize(
    ("event", "args"),
    [
        ("exec", (code_of("numpy"),)),
        ("exec", (code_of("headrace/frontend"),)),
        ("subprocess.Popen", ("x", ["git", b"ls-files"])),
        ("open", ("torch", "r", 0)),
    ],
)
def test_other_deeds_of_a_unit_test_are_let_be(event: str, args: tuple[Any, ...]) -> None:
    refuse_slow(event, args)
