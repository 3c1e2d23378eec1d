"""Which tests of GPUs' kernels run: all on a GPU and by `make gpu-static`, some by `make test`."""

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest
from family_table import WRITES

T = TypeVar("T")
RUNS_ALL = os.environ.get("TRITON_INTERPRET") != "1" or "GPU_STATIC" in os.environ or WRITES
rarely = pytest.mark.skipif(not RUNS_ALL, reason="make gpu-static runs it")


def first_of(count: int, cases: Sequence[T]) -> Sequence[T]:
    """Return all cases of a test, or so many."""
    return cases if RUNS_ALL else cases[:count]
