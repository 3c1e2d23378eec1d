"""What a step draws on the device is what it draws on the host, rows that ask for more included."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from random_decoders import SPEC

from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.worker.cuda.cuda_runner import Copied
from headrace.engine_proc.worker.cuda.cuda_sampler import (
    CudaSampler,
    DeviceHistories,
    adjusted_rows,
)
from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.cuda.row_draws import RowDraws
from headrace.engine_proc.worker.cuda.sharded_ops import ShardedOps
from headrace.engine_proc.worker.cuda.step_buffers import StepBuffers
from headrace.engine_proc.worker.execution.cpu_sampler import ROW, Masks, Sampler
from headrace.engine_proc.worker.execution.executor import Batch, Floats, Logits
from headrace.engine_proc.worker.execution.runner import GenerationRunner, MaskSource, no_masks
from headrace.ipc.token_logprobs import TokenLogprob
from headrace.ipc.worker_messages import Step, StepResult

VOCAB_SIZE = 150
ALONE = ShardedOps(SPEC, None)
NO_COLUMN = np.empty(0, np.int32)
PLAIN: dict[str, Any] = {"temperature": 1, "top_p": 0.9, "num_logprobs": -1, "target": -1}


def make_sampler(device: torch.device) -> CudaSampler:
    buffers = StepBuffers(
        Sizes(20, 20, 20), page_tokens=16, max_pages=1, vocab_size=VOCAB_SIZE, device=device
    )
    return CudaSampler(device, RowDraws(buffers), DeviceHistories(3, 5, device))


class Says:
    """An executor that has its logits already."""

    def __init__(self, logits: Floats) -> None:
        self._logits = logits

    def logits(self, batch: Batch) -> Logits:
        return Logits(self._logits)

    def embed(self, batch: Batch) -> Floats:
        return self._logits


def step_of(
    rows: list[dict[str, Any]],
    masked_rows: list[int] | None = None,
    history: list[int] | None = None,
    biases: dict[int, float] | None = None,
    updates: list[int] | None = None,
) -> Step:
    columns = np.zeros(len(rows), ROW)
    for index, row in enumerate(rows):
        fields = {"seed": 7, "position": index, "repetition_penalty": 1, **PLAIN, **row}
        for name, value in fields.items():
            columns[name][index] = value
    one = np.zeros(1, np.int32).tobytes()
    return Step(
        token_ids=one,
        positions=one,
        sequences=one,
        page_table=one,
        logit_rows=np.zeros(len(rows), np.int32).tobytes(),
        rows=columns.tobytes(),
        history=np.array(history or [], np.int32).tobytes(),
        history_updates=np.array(updates or [], np.int32).tobytes(),
        bias_tokens=np.array([*(biases or {})], np.int32).tobytes(),
        bias=np.array([*(biases or {}).values()], np.float32).tobytes(),
        masked_rows=np.array(masked_rows or [], np.int32).tobytes(),
    )


def masks_allowing(*tokens: list[int]) -> MaskSource:
    def masks(num_rows: int) -> Masks:
        allowed = np.zeros((num_rows, 160), np.uint8)
        for row, own in enumerate(tokens):
            allowed[row, own] = 1
        return np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)

    return masks


STEPS: dict[str, tuple[Step, MaskSource]] = {
    "nothing": (step_of([]), no_masks),
    "draws": (step_of([{}, {"temperature": 0}, {"top_k": 3}, {"min_p": 0.1}]), no_masks),
    "masks": (step_of([{}, {}, {}], masked_rows=[0, 2]), masks_allowing([3, 149], [8])),
    "biases": (
        step_of(
            [{}, {"num_bias": 3}, {"bias_start": 1, "num_bias": 1}], biases={4: 9, 5: 8, 6: -9}
        ),
        no_masks,
    ),
    "mixed": (
        step_of(
            [
                {"num_logprobs": 2},
                {},
                {"history_slot": 2, "num_history": 4, "num_prompt": 1, "frequency_penalty": 3},
                {"target": 11, "num_logprobs": 0},
                # What its mask allows is banned, so the mask counts alone.
                {"num_bias": 2, "temperature": 0, "num_logprobs": 3},
                {},
            ],
            masked_rows=[0, 4, 5],
            history=[9, 9, 9, 1, 2, 3, 3, 4],
            updates=[0, 0, 3, 2, 0, 5],
            biases={7: -np.inf, 8: -np.inf},
        ),
        masks_allowing([5, 6], [7, 8], [9]),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_tokens_and_log_probabilities_are_the_hosts(name: str, device: torch.device) -> None:
    step, masks_of = STEPS[name]
    num_rows = len(step.logit_rows) // 4
    logits = np.random.default_rng(3).normal(0, 2, (num_rows, VOCAB_SIZE)).astype(np.float32)
    host = Sampler(VOCAB_SIZE, threads=1)
    expected = GenerationRunner(Says(logits), host).run(step, masks_of)
    on_device = torch.from_numpy(logits.copy()).to(device)
    sampler = make_sampler(device)
    sampler.send_rows(step)
    drawn = sampler.sample(on_device, step, masks_of)
    assert drawn.tokens.cpu().numpy().tobytes() == expected.token_ids
    found = Copied(drawn, ALONE).wait()
    num_tops = np.frombuffer(step.rows, ROW)["num_logprobs"].tolist()
    ours, theirs = (reports_of(result, num_tops) for result in (found, expected))
    assert [(x.rank, [token for token, _ in x.top]) for x in ours] == [
        (x.rank, [token for token, _ in x.top]) for x in theirs
    ]
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
        assert [x for _, x in a.top] == pytest.approx([x for _, x in b.top], abs=1e-5)


def test_penalties_know_what_the_step_before_has_drawn(device: torch.device) -> None:
    """The second row has a mask, too."""
    penalized = {"temperature": 0, "num_history": 2, "presence_penalty": 9}
    bare = [penalized, {**penalized, "history_slot": 2}]
    first = step_of([{"temperature": 0}] * 2)
    updates = [0, 0, 2, 2, 0, 2]
    second = step_of(bare, masked_rows=[1], history=[0, -2, 0, -1], updates=updates)
    logits = np.zeros((2, VOCAB_SIZE), np.float32)
    logits[0, 5], logits[1, 8] = 9, 9
    after = np.zeros_like(logits)
    after[:, [5, 7, 8]] = [3, 1, 3]
    sampler = make_sampler(device)
    found = []
    for numbers, step, masks in (
        (logits, first, no_masks),
        (after, second, masks_allowing([5, 7])),
    ):
        sampler.send_rows(step)
        drawn = sampler.sample(torch.from_numpy(numbers).to(device), step, masks)
        found.append(drawn.tokens.tolist())
    assert found == [[5, 8], [5, 7]]


def reports_of(result: StepResult, num_tops: list[int]) -> list[TokenLogprob]:
    """Return what is told of each row that wants it."""
    outcome = ResultReader(result, 0)
    wanted = [num_top for num_top in num_tops if num_top >= 0]
    reports = [TokenLogprob.unpack(outcome.logprob(num_top)) for num_top in wanted]
    with pytest.raises(ValueError, match="bytes are left"):
        outcome.logprob(0)  # that was all
    return reports


def test_masked_rows_are_kept_where_something_else_counts() -> None:
    step, _ = STEPS["mixed"]
    rows: npt.NDArray[np.void] = np.frombuffer(step.rows, ROW)
    assert adjusted_rows(rows, np.array([0, 4, 5], np.int32)).tolist() == [4]
    assert adjusted_rows(rows, NO_COLUMN).tolist() == []


def test_masks_are_asked_for_once_all_else_is_on_its_way(device: torch.device) -> None:
    asked = []

    def masks_of(num_rows: int) -> Masks:
        asked.append(num_rows)
        return masks_allowing([5], [6])(num_rows)

    step = msgspec.structs.replace(step_of([{}, {}]), masked_rows=np.int32([0, 1]).tobytes())
    sampler = make_sampler(device)
    sampler.send_rows(step)
    drawn = sampler.sample(torch.zeros(2, VOCAB_SIZE, device=device), step, masks_of)
    assert (drawn.tokens.tolist(), asked) == ([5, 6], [2])
