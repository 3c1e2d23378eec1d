"""A result is read as it was asked for."""

from array import array

import pytest

from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.ipc.token_logprobs import PAIR, ROW, TokenLogprob
from headrace.ipc.worker_messages import StepResult


def test_rows_and_logprobs_come_in_turn() -> None:
    logprobs = ROW.pack(-0.5, 2) + PAIR.pack(7, -0.25) + PAIR.pack(8, -0.5) + ROW.pack(-1, 1)
    outcome = ResultReader(StepResult(array("i", [8, 9, 4]).tobytes(), logprobs), 0)
    assert outcome.token() == 8
    assert TokenLogprob.unpack(outcome.logprob(2)) == (-0.5, 2, [(7, -0.25), (8, -0.5)])
    assert outcome.token() == 9
    assert outcome.token() == 4
    assert TokenLogprob.unpack(outcome.logprob(0)) == (-1, 1, [])


def test_embeddings_are_of_one_size() -> None:
    outcome = ResultReader(StepResult(b"", b"", b"12345678abcdefgh"), 2)
    assert (outcome.embedding(), outcome.embedding()) == (b"12345678", b"abcdefgh")


def test_a_result_with_too_few_tokens_is_not_taken() -> None:
    with pytest.raises(StopIteration):
        ResultReader(StepResult(b""), 0).token()
