"""Kernels run on a GPU where there is one, else in Triton's interpreter."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from mutants.quick_interpreter import quick_interpreter


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture(autouse=True, scope="session")
def quickly_interpreted() -> Iterator[Any]:
    """Where there is no GPU, kernels are interpreted quickly; with it `own_interpreter` is told."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    with quick_interpreter() if is_interpreted else nullcontext() as scope:
        yield scope
