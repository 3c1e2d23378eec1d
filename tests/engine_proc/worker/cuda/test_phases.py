"""Phases are marked where that is asked for and can be."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from headrace.engine_proc.worker.cuda.phases import phases
from headrace.errors import ConfigError


def test_phases_are_marked_only_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        told.append(name)
        yield
        told.append(f"end of {name}")

    monkeypatch.setattr(torch.cuda.nvtx, "range", marked)
    monkeypatch.setattr(torch.cuda.nvtx, "mark", told.append)
    for phase in (phases(nvtx=False), phases(nvtx=True)):
        with phase("forward"):
            told.append("work")
    assert told == ["headrace", "work", "forward", "work", "end of forward"]
    quiet = phases(nvtx=False)
    assert quiet("prepare") is quiet("copy"), "nothing is made where nothing is marked"


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_a_torch_without_nvtx_is_said() -> None:
    with pytest.raises(ConfigError, match="--nvtx: NVTX functions not installed"):
        phases(nvtx=True)
