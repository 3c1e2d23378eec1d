"""A step's columns reach the sampler, and what it brings can be read by the engine."""

from array import array
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.step.history_slots import HistorySlots
from headrace.engine_proc.step.sampling_metadata import SamplingMetadata
from headrace.engine_proc.worker.execution.cpu_sampler import Masks, Sampler
from headrace.engine_proc.worker.execution.embedder import Embedder
from headrace.engine_proc.worker.execution.executor import Batch, Floats, Logits
from headrace.engine_proc.worker.execution.runner import EmbeddingRunner, GenerationRunner
from headrace.ipc.messages import GenerateRequest, Sampling
from headrace.ipc.token_logprobs import TokenLogprob
from headrace.ipc.worker_messages import Step

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
NO_DRAFTS = array("i")


class Unmoved:
    """An executor whose model says the same whatever it reads."""

    spec: Any = None

    def logits(self, batch: Batch) -> Logits:
        return Logits(np.tile(LOGITS, (len(batch.logit_rows), 1)))

    def embed(self, batch: Batch) -> Floats:
        tokens = batch.token_ids[batch.logit_rows].astype(np.float32)
        return np.stack([3 * tokens, 4 * tokens], axis=1)


def sequence_of(generated: list[int], **sampling: Any) -> Sequence:
    request = GenerateRequest(1, 0, 9, Sampling(**sampling), [0], b"")
    sequence = Sequence.of(request, array("I", [3, 1]).tobytes())
    sequence.tokens.extend(generated)
    return sequence


def new_rows() -> SamplingMetadata:
    return SamplingMetadata(HistorySlots(9))


def draw(rows: SamplingMetadata, sequence: Sequence, drafts: "array[int]" = NO_DRAFTS) -> None:
    rows.tell(sequence, len(sequence.tokens), drafts)
    rows.draw(sequence, len(sequence.tokens) + len(drafts), drafts)


def step_of(rows: SamplingMetadata, num_rows: int) -> Step:
    tokens = np.arange(max(1, num_rows), dtype=np.int32)
    return Step(
        token_ids=tokens.tobytes(),
        positions=tokens.tobytes(),
        sequences=np.zeros_like(tokens).tobytes(),
        page_table=np.zeros(1, np.int32).tobytes(),
        logit_rows=tokens[:num_rows].tobytes(),
        rows=bytes(rows.rows),
        history=rows.history.tobytes(),
        history_updates=rows.history_updates.tobytes(),
        bias_tokens=rows.bias_tokens.tobytes(),
        bias=rows.bias.tobytes(),
    )


def run(rows: SamplingMetadata, num_rows: int) -> ResultReader:
    step = step_of(rows, num_rows)
    return ResultReader(GenerationRunner(Unmoved(), Sampler(len(LOGITS))).run(step), num_pooled=0)


def test_masks_are_asked_for_once_the_logits_are_there() -> None:
    rows = new_rows()
    for _ in range(2):
        draw(rows, sequence_of([]))
    asked = []

    def masks_of(num_rows: int) -> Masks:
        asked.append(num_rows)
        return np.array([[0b0100]], np.uint32)

    step = msgspec.structs.replace(step_of(rows, 2), masked_rows=np.array([1], "<i4").tobytes())
    result = GenerationRunner(Unmoved(), Sampler(len(LOGITS))).run(step, masks_of)
    assert (list(array("i", result.token_ids)), asked) == ([0, 2], [1])


def test_each_sequence_is_sampled_as_it_asks() -> None:
    rows = new_rows()
    draw(rows, sequence_of([]))
    draw(rows, sequence_of([], logit_bias={2: 5.0}))
    draw(rows, sequence_of([], min_tokens=1))  # its stop token is 0
    draw(rows, sequence_of([0], presence_penalty=1.0))
    draw(rows, sequence_of([0, 0], frequency_penalty=1.0), array("i", [1]))
    draw(rows, sequence_of([0], repetition_penalty=2.0))  # 1 is in the prompt
    outcome = run(rows, 6)
    assert [outcome.token() for _ in range(6)] == [0, 2, 1, 1, 2, 2]


def test_log_probabilities_come_with_the_rows_that_want_them() -> None:
    rows = new_rows()
    rows.watch(sequence_of([], prompt_logprobs=1), 1)
    draw(rows, sequence_of([]))
    draw(rows, sequence_of([], logprobs=2, logit_bias={3: 9.0}))
    outcome = run(rows, 3)
    assert outcome.token() == 1
    watched = TokenLogprob.unpack(outcome.logprob(1))
    assert (outcome.token(), outcome.token()) == (0, 3)
    drawn = TokenLogprob.unpack(outcome.logprob(2))
    assert (watched.logprob, watched.rank) == (pytest.approx(np.log(0.3)), 2)
    assert watched.top == [(0, pytest.approx(np.log(0.4)))]
    assert (drawn.logprob, drawn.rank) == (pytest.approx(np.log(0.1)), 4)
    assert drawn.top == [(0, pytest.approx(np.log(0.4))), (1, pytest.approx(np.log(0.3)))]


def test_a_step_may_want_no_token() -> None:
    with pytest.raises(StopIteration):
        run(new_rows(), 0).token()


def test_tokens_that_the_step_before_draws_take_their_places() -> None:
    seen = []

    class Watched(Unmoved):
        def logits(self, batch: Batch) -> Logits:
            seen.append(batch.token_ids.tolist())
            return super().logits(batch)

    rows = new_rows()
    for banned in ({}, {0: -9.0}, {0: -9.0, 1: -9.0}):
        draw(rows, sequence_of([], logit_bias=banned))
    runner = GenerationRunner(Watched(), Sampler(len(LOGITS)))
    step = step_of(rows, 3)  # draws 0, 1, 2
    runner.run(step)
    ahead = msgspec.structs.replace(
        step,
        token_ids=np.array([0, 3, 0], np.int32).tobytes(),
        token_sources=np.array([2, -1, 1], np.int32).tobytes(),
    )
    runner.run(ahead)
    assert seen == [[0, 1, 2], [2, 3, 1]]


def test_penalties_know_what_the_step_before_draws() -> None:
    histories = HistorySlots(2)
    first, second = SamplingMetadata(histories), SamplingMetadata(histories)
    sequence = sequence_of([], presence_penalty=9.0)
    draw(first, sequence_of([], logit_bias={3: 9.0}))
    draw(first, sequence)  # 0
    sequence.row = 1
    second.tell(sequence, len(sequence.tokens) + 1, NO_DRAFTS)
    assert second.history.tolist() == [-2]
    second.draw(sequence, len(sequence.tokens) + 1, NO_DRAFTS)
    runner = GenerationRunner(Unmoved(), Sampler(len(LOGITS)))
    drawn = [
        array("i", runner.run(step_of(rows, num_rows)).token_ids).tolist()
        for rows, num_rows in ((first, 2), (second, 1))
    ]
    assert drawn == [[3, 0], [1]]


@pytest.mark.parametrize("rows", [[], [1, 3]])
def test_each_pooled_row_has_a_vector_of_length_one(rows: list[int]) -> None:
    tokens = np.arange(1, 5, dtype=np.int32)
    step = Step(
        token_ids=tokens.tobytes(),
        positions=tokens.tobytes(),
        sequences=np.zeros_like(tokens).tobytes(),
        page_table=np.zeros(1, np.int32).tobytes(),
        logit_rows=b"",
        rows=b"",
        pooled_rows=np.array(rows, np.int32).tobytes(),
    )
    result = EmbeddingRunner(Embedder(Unmoved(), normalize=True)).run(step)
    vectors = np.frombuffer(result.embeddings, np.float32).reshape(-1, 2)
    assert vectors.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]] * len(rows)
