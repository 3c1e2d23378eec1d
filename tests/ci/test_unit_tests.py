"""The choice of files for `make test-fast`."""

from pathlib import Path

import pytest
from unit_tests import is_left_out


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
