"""GPUs of ranks, for tests of the all-reduce."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.system import all_reduce_policy


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have graphs read their inputs where they lie, however small they are."""
    monkeypatch.setattr(all_reduce_policy, "STAGED_BYTES", 0)


@pytest.fixture(params=["threads", "streams"])
def make_gpu(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """What makes a rank's GPU."""
    # With torch, which the unit tests of this folder do without.
    from gpu_streams import StreamGpu, limited, need_gpu
    from gpu_threads import ThreadGpu

    if request.param == "threads":
        yield ThreadGpu
        return
    need_gpu()
    with limited():
        yield StreamGpu
