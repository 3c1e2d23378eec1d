"""The benchmark of sums over GPUs, and what tests and it rely on where ranks share memory."""

import os
from types import SimpleNamespace
from typing import Any

import gpu_streams
import pytest
import torch

import cuda_all_reduce


def test_inputs_that_other_ranks_map_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A freed one would be unmapped, or be another tensor's, while peers read it."""
    on_cpu = SimpleNamespace(
        bfloat16=torch.bfloat16, zeros=lambda size, dtype, device: torch.zeros(size, dtype=dtype)
    )
    world = SimpleNamespace(group=SimpleNamespace(WORLD=SimpleNamespace(group_name="")))
    monkeypatch.setattr(cuda_all_reduce, "torch", on_cpu)
    monkeypatch.setattr(cuda_all_reduce, "dist", world)
    monkeypatch.setattr(cuda_all_reduce, "KEPT", [])
    asked: list[int] = []

    def choice(x: torch.Tensor) -> Any:
        asked.append(x.data_ptr())
        return SimpleNamespace(algorithm=SimpleNamespace(value="one-shot"))

    ours = SimpleNamespace(choice=choice, all_reduce=None, capture=None)
    for num_bytes in (2048, 4096, 4096):
        calls = cuda_all_reduce.calls(num_bytes, ours, 2)
        assert next(calls)[0] == cuda_all_reduce.OURS
        calls.close()
    assert [x.data_ptr() for x in cuda_all_reduce.KEPT] == asked
    assert len(set(asked)) == 3


def test_streams_have_queues_and_tests_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight streams whose kernels wait for each other need a queue each."""
    assert int(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]) >= 8
    called: list[Any] = []
    handler = SimpleNamespace(
        dump_traceback_later=lambda after, exit: called.append((after, exit)),
        cancel_dump_traceback_later=lambda: called.append("cancelled"),
    )
    monkeypatch.setattr(gpu_streams, "faulthandler", handler)
    with pytest.raises(ValueError, match="a test"), gpu_streams.limited():
        assert called == [(gpu_streams.LIMIT_S, True)]
        raise ValueError("a test")
    assert called[1:] == ["cancelled"]
