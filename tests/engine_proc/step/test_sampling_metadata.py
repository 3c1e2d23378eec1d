"""Bans and penalties are those of the sequence, guesses included."""

from array import array
from typing import Any

import pytest
from sampling_rows import sampling_rows

from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.step.history_slots import HistorySlots
from headrace.engine_proc.step.sampling_metadata import BAN, SamplingMetadata, banned_tokens
from headrace.ipc.messages import GenerateRequest, Sampling

PROMPT = [1, 2, 3]


def make_sequence(generated: list[int], **options: Any) -> Sequence:
    request = GenerateRequest(1, 0, 100, Sampling(**options), [50, 51], b"")
    sequence = Sequence.of(request, array("I", PROMPT).tobytes())
    sequence.tokens.extend(generated)
    return sequence


def banned(generated: list[int], drafts: list[int], **options: Any) -> list[int]:
    sequence = make_sequence(generated, **options)
    return banned_tokens(sequence, len(sequence.tokens) + len(drafts), array("i", drafts))


@pytest.mark.parametrize(
    ("generated", "drafts", "expected"),
    [([], [], [50, 51]), ([7], [8], [50, 51]), ([7, 8, 9], [], []), ([7], [8, 9], [])],
)
def test_no_stop_token_before_min_tokens(
    generated: list[int], drafts: list[int], expected: list[int]
) -> None:
    assert banned(generated, drafts, min_tokens=3) == expected


@pytest.mark.parametrize(
    ("generated", "drafts", "expected"),
    [
        ([], [], [9]),
        ([4], [], [9]),
        ([4, 5], [], [9, 6]),
        ([4], [5], [9, 6]),
        ([], [4, 5], [9, 6]),
        ([4, 5, 8], [], [9]),
        ([5], [], [9]),
    ],
)
def test_a_bad_word_is_not_finished(
    generated: list[int], drafts: list[int], expected: list[int]
) -> None:
    assert banned(generated, drafts, bad_words=[[9], [4, 5, 6]]) == expected


def test_the_prompt_does_not_begin_a_bad_word() -> None:
    assert banned([], [], bad_words=[[2, 3, 4]]) == []
    assert banned([3], [], bad_words=[[2, 3, 4]]) == []


def columns(sequence: Sequence, drafts: list[int]) -> tuple[list[int], tuple[Any, ...]]:
    rows = new_rows()
    rows.tell(sequence, len(sequence.tokens), array("i", drafts))
    rows.draw(sequence, len(sequence.tokens) + len(drafts), array("i", drafts))
    (row,) = sampling_rows(rows.rows)
    return rows.history.tolist(), (row.history_slot, row.num_prompt, row.num_history)


def new_rows() -> SamplingMetadata:
    return SamplingMetadata(HistorySlots(9))


def test_repetition_looks_at_prompt_and_text() -> None:
    sequence = make_sequence([7, 8], repetition_penalty=1.5)
    assert columns(sequence, [9]) == ([1, 2, 3, 7, 8, 9], (0, 3, 6))


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_look_at_the_text_alone(name: str) -> None:
    assert columns(make_sequence([7, 8], **{name: 0.5}), [9]) == ([7, 8, 9], (0, 0, 3))


@pytest.mark.parametrize(
    ("name", "past"), [("repetition_penalty", [1, 2, 3, 7]), ("presence_penalty", [7])]
)
def test_a_token_that_is_being_sampled_is_reported_by_its_row(name: str, past: list[int]) -> None:
    sequence = make_sequence([7], **{name: 1.5})
    sequence.row = 4
    rows = new_rows()
    rows.tell(sequence, len(sequence.tokens) + 1, array("i"))
    rows.draw(sequence, len(sequence.tokens) + 1, array("i"))
    assert rows.history.tolist() == [*past, -5]


def test_without_penalties_there_is_no_history() -> None:
    assert columns(make_sequence([7, 8]), []) == ([], (0, 0, 0))


def test_biases_then_bans() -> None:
    rows = new_rows()
    rows.draw(make_sequence([], logit_bias={4: 1.5, 5: -2.0}), len(PROMPT), array("i"))
    rows.draw(make_sequence([], logit_bias={6: 1.0}, min_tokens=1), len(PROMPT), array("i"))
    assert rows.bias_tokens.tolist() == [4, 5, 6, 50, 51]
    assert rows.bias.tolist() == [1.5, -2, 1, BAN, BAN]
    drawn = sampling_rows(rows.rows)
    assert [(row.bias_start, row.num_bias) for row in drawn] == [(0, 2), (2, 3)]
