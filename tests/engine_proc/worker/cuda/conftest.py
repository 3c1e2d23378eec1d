"""Kernels run on a GPU where there is one, else in Triton's interpreter."""

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from mutants.quick_interpreter import quick_interpreter


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture(autouse=True, scope="session")
def quickly_interpreted() -> Iterator[None]:
    """Where there is no GPU, kernels are interpreted quickly."""
    with quick_interpreter() if os.environ.get("TRITON_INTERPRET") == "1" else nullcontext():
        yield
