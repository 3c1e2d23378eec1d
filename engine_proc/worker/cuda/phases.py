"""The phases of a step, as ranges that Nsight Systems shows beside what the GPU does."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from headrace.errors import ConfigError

Phase = Callable[[str], AbstractContextManager[object]]
NOTHING = nullcontext()


def no_phase(_name: str) -> AbstractContextManager[object]:
    """Mark nothing, and make nothing."""
    return NOTHING


def phases(nvtx: bool) -> Phase:
    """Return the context of a phase: prepare, forward, sampling or copy.

    Raises:
        ConfigError: this torch has no NVTX.
    """
    if not nvtx:
        return no_phase
    try:
        torch.cuda.nvtx.mark("headrace")
    except RuntimeError as error:
        raise ConfigError(f"--nvtx: {error}") from None
    return torch.cuda.nvtx.range
