"""Messages of another machine that hold what they cannot hold."""

from array import array
from typing import Any

import msgspec
import pytest

from headrace.board.fields import MAX_MODELS
from headrace.engine_proc.request_io.step_output import step_output
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.sequence.sequence_output import SequenceOutput
from headrace.ipc.messages import (
    FinishReason,
    GenerateRequest,
    Sampling,
    StepOutput,
    Times,
    request_id,
)
from headrace.ipc.prefix_index import PLACES
from headrace.ipc.remote_messages import CachedPages, Outputs, SessionState, SessionStatus
from headrace.ipc.token_logprobs import TokenLogprob
from headrace.runtime.message_checks import (
    OutputLimits,
    WrongMessage,
    check_outputs,
    check_pages,
    check_status,
)

NOW = 1_000
ENGINE, NUM_DETOKENIZERS, VOCAB_SIZE = 1, 2, 9
LIMITS = OutputLimits(ENGINE, NUM_DETOKENIZERS, VOCAB_SIZE)
FIRST = request_id(0, 1)


def step(engine: int = ENGINE, **columns: Any) -> bytes:
    output = StepOutput.of({}, [FIRST], [2], [None], engine=engine)
    return msgspec.msgpack.encode(msgspec.structs.replace(output, **columns))


def ids(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def test_right_messages_pass() -> None:
    check_status(SessionStatus(1, NOW, 5, SessionState.SERVING, num_taken=9), NOW)
    check_outputs(Outputs(1, 1), [step(), bytes(8)] * 2, LIMITS)
    check_pages(CachedPages(1, array("I", [0, PLACES - 1]).tobytes()), [bytes(16)])


@pytest.mark.parametrize(
    ("granted_at", "at", "num_taken"), [(NOW + 1, 0, 0), (0, -1, 0), (0, 0, -1)]
)
def test_times_and_counts_out_of_range_are_refused(
    granted_at: int, at: int, num_taken: int
) -> None:
    status = SessionStatus(1, granted_at, at, SessionState.SERVING, num_taken=num_taken)
    with pytest.raises(WrongMessage):
        check_status(status, NOW)


@pytest.mark.parametrize(
    ("detokenizer", "frames"),
    [
        (NUM_DETOKENIZERS, [step(), bytes(8)]),
        (-1, [step(), bytes(8)]),
        (0, [step()]),
        (0, [step(), bytes(4)]),
        (0, [step(engine=0), bytes(8)]),
        (0, [step(times={FIRST: Times(1, model=MAX_MODELS)}), bytes(8)]),
        (0, [step(times={FIRST: Times(1, model=-1)}), bytes(8)]),
        (0, [step(counts=bytes(8)), bytes(8)]),
        (0, [step(ids=b"x"), bytes(8)]),
        (0, [step(finished=b"\x7f"), bytes(8)]),
    ],
)
def test_steps_that_do_not_fit_are_refused(detokenizer: int, frames: list[bytes]) -> None:
    with pytest.raises(WrongMessage):
        check_outputs(Outputs(1, detokenizer), [*frames], LIMITS)


def row(*tokens: int) -> bytes:
    return TokenLogprob(-0.5, 1, [(token, -0.5) for token in tokens]).pack()


def test_tokens_of_the_vocabulary_pass() -> None:
    columns = {
        "logprobs": {FIRST: row(0, VOCAB_SIZE - 1) * 2},
        "prompts": {FIRST: ids(3, VOCAB_SIZE - 1)},
        "prompt_logprobs": {FIRST: row()},
    }
    check_outputs(Outputs(1, 0), [step(**columns), ids(0, VOCAB_SIZE - 1)], LIMITS)


@pytest.mark.parametrize(
    ("tokens", "columns"),
    [
        ((0, VOCAB_SIZE), {}),
        ((0, (1 << 32) - 1), {}),
        ((0, 0), {"logprobs": {FIRST: row(0) + row(VOCAB_SIZE)}}),
        ((0, 0), {"logprobs": {FIRST: row(-1) * 2}}),
        ((0, 0), {"logprobs": {FIRST: row(0) * 3}}),
        ((0, 0), {"logprobs": {request_id(0, 2): row(0)}}),
        ((0, 0), {"prompts": {FIRST: ids(VOCAB_SIZE)}}),
        ((0, 0), {"prompts": {FIRST: b"x"}}),
        ((0, 0), {"prompts": {FIRST: ids(0, 1)}, "prompt_logprobs": {FIRST: row(VOCAB_SIZE)}}),
    ],
)
def test_tokens_beyond_the_vocabulary_are_refused(
    tokens: tuple[int, ...], columns: dict[str, Any]
) -> None:
    with pytest.raises(WrongMessage):
        check_outputs(Outputs(1, 0), [step(**columns), ids(*tokens)], LIMITS)


@pytest.mark.parametrize("finished", [FinishReason.ABORT, FinishReason.REFUSED])
def test_prompts_that_were_cut_off_pass(finished: FinishReason) -> None:
    request = GenerateRequest(FIRST, 0, 1, Sampling(prompt_logprobs=0), [], b"")
    sequence = Sequence.of(request, ids(1, 2, 3), 0)
    sequence.prompt_logprobs += row()
    output, tokens = step_output([SequenceOutput(sequence, [], finished)])
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(output, engine=ENGINE))
    check_outputs(Outputs(1, 0), [encoded, tokens], LIMITS)


def test_steps_that_are_none_are_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        check_outputs(Outputs(1, 0), [b"x", b""], LIMITS)


@pytest.mark.parametrize(
    ("places", "frames"),
    [([PLACES], [bytes(8)]), ([0], [bytes(16)]), ([0], []), ([0], [bytes(8), bytes(8)])],
)
def test_places_beyond_the_index_are_refused(places: list[int], frames: list[bytes]) -> None:
    with pytest.raises(WrongMessage):
        check_pages(CachedPages(1, array("I", places).tobytes()), [*frames])


@pytest.mark.parametrize("index", [-1, 2])
def test_pages_of_an_unknown_index_are_refused(index: int) -> None:
    with pytest.raises(WrongMessage):
        check_pages(CachedPages(1, b"", index), [b""])
