"""Workers are told what is new of a history, and all of it where they may not know it."""

from array import array
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rows import sampling_rows

from headrace.engine_proc.sequence.chunk import NO_TOKENS, Chunk
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.step.history_slots import HistorySlots
from headrace.engine_proc.step.step_builder import StepBuilder
from headrace.ipc.messages import GenerateRequest, Sampling, request_id
from headrace.ipc.worker_messages import Step

MAX_NUM_SEQS = 3
UPDATE_BYTES = 4 + 3 * 4  # a token, and where it goes


def make_sequence(num_prompt: int, **options: Any) -> Sequence:
    sampling = Sampling(**(options or {"repetition_penalty": 1.5}))
    request = GenerateRequest(request_id(0, 1), 0, 9999, sampling, [], b"")
    return Sequence.of(request, array("I", range(100, 100 + num_prompt)).tobytes())


def chunk_of(sequence: Sequence, drafts: "array[int]" = NO_TOKENS) -> Chunk:
    """Return the chunk of a sequence's newest token, and of drafts behind it."""
    return Chunk.of(sequence, sequence.num_expected - 1, 1, drafts)


def say(sequence: Sequence, *tokens: int) -> None:
    """Let a sequence gain tokens."""
    sequence.tokens.extend(tokens)
    sequence.num_expected = len(sequence.tokens)


def updates_of(step: Step) -> list[tuple[int, int, list[int]]]:
    """Return what a step puts where: the slot, the place in it, the tokens."""
    tokens, updates = array("i", step.history), []
    for slot, start, count in np.frombuffer(step.history_updates, np.int32).reshape(-1, 3).tolist():
        updates.append((slot, start, tokens[:count].tolist()))
        del tokens[:count]
    assert not tokens
    return updates


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_decode_tells_one_token_however_long_the_text(name: str, num_ahead: int) -> None:
    builder = StepBuilder(MAX_NUM_SEQS)
    sizes = {}
    for length in (30, 3000):
        sequences = [make_sequence(length, **{name: 0.5}) for _ in range(MAX_NUM_SEQS)]
        for sequence in sequences:
            say(sequence, *range(length))
        for _ in range(3):
            for sequence in sequences:
                say(sequence, 7)
                sequence.num_expected += num_ahead
            step = builder.build([chunk_of(sequence) for sequence in sequences])
        assert len(step.history) + len(step.history_updates) == MAX_NUM_SEQS * UPDATE_BYTES
        sizes[length] = len(msgspec.msgpack.encode(step))
        for sequence in sequences:
            sequence.has_ended = True
    # Positions and the like take as many bytes.
    assert sizes[30] == sizes[3000] < 1500


def test_a_token_is_told_before_it_is_known() -> None:
    builder, sequence, other = StepBuilder(2), make_sequence(2), make_sequence(1)
    builder.build([chunk_of(other), chunk_of(sequence)])
    sequence.num_expected += 1
    ahead = builder.build([chunk_of(sequence)])
    assert updates_of(ahead) == [(1, 2, [-1 - 1])]
    sequence.tokens.append(7)  # it is known, and the next one is being drawn
    sequence.num_expected += 1
    assert updates_of(builder.build([chunk_of(sequence)])) == [(1, 3, [-1 - 0])]
    (row,) = sampling_rows(ahead.rows)
    assert (row.history_slot, row.num_prompt, row.num_history) == (1, 2, 3)


def test_tokens_take_the_place_of_rejected_drafts() -> None:
    builder, sequence = StepBuilder(1), make_sequence(3)
    builder.build([chunk_of(sequence)])
    say(sequence, 7)
    step = builder.build([chunk_of(sequence, array("i", [8, 9]))])
    assert updates_of(step) == [(0, 3, [7, 8, 9])]
    assert [row.num_history for row in sampling_rows(step.rows)] == [4, 5, 6]
    say(sequence, 8, 5)  # the second draft was wrong
    assert updates_of(builder.build([chunk_of(sequence)])) == [(0, 4, [8, 5])]


def test_a_draft_model_and_the_model_share_a_slot() -> None:
    builder, sequence = StepBuilder(1), make_sequence(3)
    builder.build([chunk_of(sequence)])
    say(sequence, 7)

    def draft() -> Step:
        end = len(sequence.tokens) + len(sequence.drafts)
        return builder.build([Chunk(sequence, end - 1, 1, NO_TOKENS, True, is_draft=True)])

    assert updates_of(draft()) == [(0, 3, [7])]
    sequence.drafts.append(8)
    assert updates_of(draft()) == [(0, 4, [8])]
    sequence.drafts.append(9)
    step = builder.build([chunk_of(sequence, sequence.drafts)])
    assert updates_of(step) == [(0, 4, [8, 9])]
    say(sequence, 6)
    assert updates_of(builder.build([chunk_of(sequence)])) == [(0, 4, [6])]


def test_workers_that_may_know_nothing_are_told_all() -> None:
    builder, sequence = StepBuilder(1), make_sequence(3)
    builder.build([chunk_of(sequence)])
    builder.start_over()
    say(sequence, 7)
    assert updates_of(builder.build([chunk_of(sequence)])) == [(0, 0, [100, 101, 102, 7])]


def test_the_slot_of_an_ended_sequence_is_told_whole_to_the_next() -> None:
    builder, first, second = StepBuilder(2), make_sequence(5), make_sequence(2)
    builder.build([chunk_of(first)])
    first.has_ended = True
    step = builder.build([chunk_of(second)])
    assert updates_of(step) == [(0, 0, [100, 101])]
    assert [row.num_history for row in sampling_rows(step.rows)] == [2]


def test_a_preempted_sequence_keeps_its_slot_if_there_are_others() -> None:
    builder, sequences = StepBuilder(2), [make_sequence(2) for _ in range(4)]
    for sequence in sequences[:2]:
        builder.build([chunk_of(sequence)])
    say(sequences[0], 7)
    assert updates_of(builder.build([chunk_of(sequences[0])])) == [(0, 2, [7])]
    assert updates_of(builder.build([chunk_of(sequences[2])])) == [(1, 0, [100, 101])]
    say(sequences[0], 8)
    assert updates_of(builder.build([chunk_of(sequences[0])])) == [(0, 3, [8])]
    say(sequences[1], 7)
    assert updates_of(builder.build([chunk_of(sequences[1])])) == [(1, 0, [100, 101, 7])]


def test_sequences_without_penalties_or_rows_have_no_slot() -> None:
    builder = StepBuilder(2)
    plain, penalized = make_sequence(3, logprobs=1), make_sequence(3)
    step = builder.build([chunk_of(plain), Chunk.of(penalized, 0, 2)])
    assert step.history == step.history_updates == b""
    assert updates_of(builder.build([chunk_of(penalized)])) == [(0, 0, [100, 101, 102])]


@settings(max_examples=60)
@given(
    steps=st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=MAX_NUM_SEQS), max_size=20),
    ends=st.sets(st.tuples(st.integers(0, 20), st.integers(0, 7))),
)
def test_no_two_sequences_have_a_slot_at_once(
    steps: list[set[int]], ends: set[tuple[int, int]]
) -> None:
    slots, owners = HistorySlots(MAX_NUM_SEQS), dict[int, Sequence]()
    sequences = [make_sequence(1) for _ in range(8)]
    for number, step in enumerate(steps):
        slots.drop_ended()
        found = {index: slots.find(sequences[index]) for index in step}
        numbers = [slot.number for slot in found.values()]
        assert len({*numbers}) == len(numbers)
        assert max(numbers) < MAX_NUM_SEQS
        for index, slot in found.items():
            assert not slot.num_known or owners[slot.number] is sequences[index]
            owners[slot.number] = sequences[index]
            slot.num_known = 1
            if (number, index) in ends:
                sequences[index].has_ended = True
                sequences[index] = make_sequence(1)
