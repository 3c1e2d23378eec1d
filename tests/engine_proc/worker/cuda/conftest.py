"""Kernels run on a GPU where there is one, else in Triton's interpreter."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """For each call of a function in a kernel, the interpreter prepares `triton.language` again.

    Once for each module is enough, and takes a tenth of the time.
    """
    from triton.runtime import interpreter

    function: Any = interpreter.InterpretedFunction
    slow_call, prepared = function.__call__, set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module not in prepared:
            prepared.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    function.__call__ = call
    yield
    function.__call__ = slow_call
