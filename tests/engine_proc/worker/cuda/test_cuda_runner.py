"""Steps that are sent before the one before them has a result say what the CPU's own say."""

import dataclasses
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from random_decoders import NUM_PAGES, SPEC, cpu, random_weights
from recorded_graphs import RecordedGraphs, device_tensors

from headrace.engine_proc.step.sampling_metadata import pack
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.cuda_runner import CudaRunner
from headrace.engine_proc.worker.cuda.cuda_sampler import CudaSampler, DeviceHistories
from headrace.engine_proc.worker.cuda.graph_sizes import Buckets, Sizes
from headrace.engine_proc.worker.cuda.graphs import CudaGraphs
from headrace.engine_proc.worker.cuda.host_to_device import ArraySender
from headrace.engine_proc.worker.cuda.row_draws import RowDraws
from headrace.engine_proc.worker.cuda.sharded_ops import ShardedOps
from headrace.engine_proc.worker.cuda.step_buffers import StepBuffers
from headrace.engine_proc.worker.execution.cpu_sampler import Sampler
from headrace.engine_proc.worker.execution.executor import Batch, Int32s
from headrace.engine_proc.worker.execution.runner import GenerationRunner
from headrace.engine_proc.worker.models.specs.decoder_spec import LayerSpec
from headrace.ipc.messages import Sampling
from headrace.ipc.worker_messages import Step

TINY = dataclasses.replace(
    SPEC,
    num_heads=2,
    num_kv_heads=1,
    hidden_size=32,
    intermediate_size=40,
    layers=(LayerSpec(),),
)

LOGPROBS = Sampling(temperature=1, seed=5, logprobs=1)


def column(numbers: list[int]) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def first_step() -> Step:
    """Return three tokens of a sequence in page 4, and one of another in page 9."""
    samplings = (Sampling(temperature=1, seed=3), LOGPROBS)
    return Step(
        token_ids=column([5, 9, 1, 7]),
        positions=column([0, 1, 2, 0]),
        sequences=column([0, 0, 0, 1]),
        page_table=column([4, 9]),
        logit_rows=column([2, 3]),
        rows=b"".join(pack(sampling, 3, (0, 0, 0), (0, 0)) for sampling in samplings),
    )


def step_after(first: Step) -> Step:
    """Return the step after it, the sequences in the other order. No token of it is known."""
    return Step(
        token_ids=column([0, 0]),
        positions=column([1, 3]),
        sequences=column([0, 1]),
        page_table=column([9, 4]),
        logit_rows=column([0, 1]),
        rows=first.rows,
        token_sources=column([1, 0]),
    )


@pytest.mark.parametrize("in_graphs", [False, True])
def test_tokens_are_relayed_on_the_device(in_graphs: bool, device: torch.device) -> None:
    first = first_step()
    second = step_after(first)
    weights = random_weights(TINY)
    executor = CudaExecutor(
        TINY,
        weights,
        num_pages=NUM_PAGES,
        page_tokens=16,
        device=device,
        dtype=torch.float32,
        largest=Sizes(8, 2, 2),
        max_model_len=16,
    )
    if in_graphs:
        stand_in = partial(RecordedGraphs, list(device_tensors(executor)))
        buckets = Buckets([Sizes(4, 2, 2)])
        executor.capture(buckets, stand_in if device.type == "cpu" else CudaGraphs)
    ours = CudaRunner(executor, CudaSampler(device, executor.draws, DeviceHistories(2, 64, device)))
    theirs = GenerationRunner(cpu(TINY, weights), Sampler(TINY.vocab_size, threads=1))
    promises = [ours.run(first), ours.run(second)]  # the first is not read yet
    expected = [theirs.run(first), theirs.run(second)]
    for pending, result in zip(promises, expected, strict=True):
        assert tokens_of(pending.wait().token_ids).tolist() == tokens_of(result.token_ids).tolist()
        assert pending.is_there
        assert len(pending.wait().logprobs) == len(result.logprobs) > 0


class Zeros:
    """An executor whose logits are 0, and which writes down when they are asked for."""

    shard_group = ShardedOps(TINY, None)

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def logits(self, batch: Batch) -> torch.Tensor:
        self._said.append("forward pass")
        return torch.zeros(len(batch.logit_rows), TINY.vocab_size)


def test_nothing_is_sent_between_a_forward_pass_and_its_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    buffers = StepBuffers(
        Sizes(8, 2, 2), page_tokens=16, max_pages=1, vocab_size=1, device=torch.device("cpu")
    )
    draws = RowDraws(buffers)
    histories = DeviceHistories(2, 16, buffers.drawn.device)
    sampler = CudaSampler(buffers.drawn.device, draws, histories)
    monkeypatch.setattr(ArraySender, "send", lambda *_: said.append("rows"))

    def draw(logits: torch.Tensor) -> torch.Tensor:
        said.append("draw")
        return buffers.drawn[: len(logits)]

    monkeypatch.setattr(draws, "draw", draw)
    step = msgspec.structs.replace(first_step(), rows=pack(Sampling(temperature=1)) * 2)
    executor: Any = Zeros(said)
    CudaRunner(executor, sampler).run(step)
    assert said == ["rows", "forward pass", "draw"]


def tokens_of(ids: bytes) -> Int32s:
    return np.frombuffer(ids, np.int32)
