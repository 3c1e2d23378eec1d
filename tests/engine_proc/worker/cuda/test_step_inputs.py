"""A step's inputs follow from the number of tokens of each sequence in it."""

import dataclasses

import numpy as np
import pytest
import torch

from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.cuda.step_inputs import (
    ROPE_PARTS,
    STATE_PARTS,
    StepInputs,
    pack,
    packed_size,
    prepare_inputs,
    prepare_moves,
    reference,
    reference_moves,
)
from headrace.engine_proc.worker.execution.executor import Batch

PAGE_TOKENS = 16
MAX_PAGES = 15
COUNTS, STARTS = [1, 130, 3], [100, 0, 7]  # more than a block


def step() -> Batch:
    rng = np.random.default_rng(0)
    positions = [np.arange(a, a + n) for a, n in zip(STARTS, COUNTS, strict=True)]
    token_sources = np.full(sum(COUNTS), -1, np.int32)
    token_sources[[0, -1]] = 2, 0
    return Batch(
        token_ids=np.arange(sum(COUNTS), dtype=np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        sequences=np.repeat([3, 1, 2], COUNTS).astype(np.int32),  # rows in any order
        page_table=rng.permutation(48).reshape(4, 12).astype(np.int32),
        logit_rows=np.array([0, 130, 132, 133], np.int32),
        token_sources=token_sources,
        adapters=np.array([0, 5, -1, 2], np.int32),
    )


def inputs(
    batch: Batch, padding: Sizes, device: torch.device, rope_parts: int = 0
) -> tuple[StepInputs, StepInputs]:
    """Prepare a step, and what it should be."""
    numbers = np.full(800, 77, np.int32)
    own, end = pack(batch, PAGE_TOKENS, numbers, rope_parts)
    assert end <= packed_size(own, MAX_PAGES, rope_parts)
    sizes = Sizes(
        own.num_tokens + padding.num_tokens,
        own.num_sequences + padding.num_sequences,
        own.num_rows + padding.num_rows,
    )
    packed = torch.from_numpy(numbers).to(device)
    drawn = torch.tensor([50, 51, 52], dtype=torch.int32, device=device)
    args = (packed, drawn, sizes, MAX_PAGES, PAGE_TOKENS, rope_parts)
    return prepare_inputs(*args), reference(*args)


def test_prompts_tokens_and_padding(device: torch.device) -> None:
    got, expected = inputs(step(), Sizes(140, 2, 3), device)
    for field in dataclasses.fields(got):
        ours, theirs = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "page_table":  # as far as there are keys; more is not told
            num_pages = torch.tensor([7, 9, 1, 0, 0, 0], device=device)
            is_told = torch.arange(MAX_PAGES, device=device) < num_pages[:, None]
            ours, theirs = ours[is_told], theirs[is_told]
            table = step().page_table
            assert ours.tolist() == [*table[3, :7], *table[1, :9], table[2, 0]]
        assert torch.equal(ours, theirs), field.name
    assert got.token_ids[:2].tolist() == [52, 1]  # the first and the last are relayed
    assert got.token_ids[133].item() == 50
    assert got.positions[[0, 1, 130, 131, 134, -1]].tolist() == [100, 0, 129, 7, -1, -1]
    assert set(got.kv_rows[134:].tolist()) == {-1}
    assert got.adapters[[0, 1, 130, 131, 133, 134, -1]].tolist() == [2, 5, 5, -1, -1, -1, -1]
    assert got.query_starts.tolist() == [0, 1, 131, 134, 134, 134, 274]
    assert got.num_keys.tolist() == [101, 130, 10, 0, 0, 0]
    assert got.logit_rows.tolist() == [0, 130, 132, 133, 0, 0, 0]


def test_positions_may_have_three_parts(device: torch.device) -> None:
    parts = np.arange(3 * 134, dtype=np.int32).reshape(-1, 3)
    for own in (parts, None):
        batch = dataclasses.replace(step(), rope_positions=own)
        got, expected = inputs(batch, Sizes(2, 1, 0), device, ROPE_PARTS)
        assert torch.equal(got.rope_positions, expected.rope_positions)
        told = np.repeat(batch.positions, 3).reshape(-1, 3) if own is None else own
        assert got.rope_positions.tolist() == [*told.tolist(), [0, 0, 0], [0, 0, 0]]
        assert got.token_ids[:2].tolist() == [52, 1]
        assert got.logit_rows.tolist() == [0, 130, 132, 133]


@pytest.mark.parametrize("rope_parts", [0, ROPE_PARTS])
def test_states_move_from_slot_to_slot(rope_parts: int, device: torch.device) -> None:
    """Drafts end a state before its sequence; without slots none moves."""
    slots = np.array([[9, 1, 2, 3], [8, 4, 5, 6]], np.int32)
    ends = np.array([0, 100, 134, 1], np.int32)
    for batch in (
        step(),
        dataclasses.replace(step(), state_in=slots[0], state_out=slots[1]),
        dataclasses.replace(step(), state_in=slots[0], state_out=slots[1], state_ends=ends),
    ):
        numbers = np.full(1200, 77, np.int32)
        own, end = pack(batch, PAGE_TOKENS, numbers, rope_parts, STATE_PARTS)
        assert end <= packed_size(own, MAX_PAGES, rope_parts, STATE_PARTS)
        sizes = Sizes(own.num_tokens + 140, own.num_sequences + 2, own.num_rows + 3)
        packed = torch.from_numpy(numbers).to(device)
        drawn = torch.tensor([50, 51, 52], dtype=torch.int32, device=device)
        got = prepare_inputs(packed, drawn, sizes, MAX_PAGES, PAGE_TOKENS, rope_parts)
        assert got.logit_rows.tolist() == [0, 130, 132, 133, 0, 0, 0]
        moves = prepare_moves(packed, got, sizes, rope_parts)
        expected = reference_moves(batch, got, sizes)
        assert torch.equal(moves.sequences, expected.sequences)
        assert torch.equal(moves.slots, expected.slots)
    assert moves.slots.tolist()[:3] == [[3, 6, 1], [1, 4, 100], [2, 5, 134]]
    assert moves.slots.tolist()[3:] == 3 * [[-1, -1, -1]]
    assert moves.sequences[[0, 1, 130, 131, 133, 134, -1]].tolist() == [0, 1, 1, 2, 2, 5, 5]


def test_pages_are_sent_as_far_as_there_are_keys() -> None:
    """Of 256 sequences one has 4,096 pages. The others were sent as many, 4 MB in all."""
    num = 256
    positions = np.full(num, 300, np.int32)
    positions[7] = 4096 * PAGE_TOKENS - 1
    own = np.arange(num, dtype=np.int32)
    table = np.zeros((num, 4096), np.int32)
    step = Batch(own, positions, own, table, own)
    _, end = pack(step, PAGE_TOKENS, np.zeros(packed_size(Sizes(num, num, num), 4096), np.int32))
    assert 4 * end < 48_000


def test_a_step_without_padding_or_rows(device: torch.device) -> None:
    batch = dataclasses.replace(step(), logit_rows=np.empty(0, np.int32), token_sources=None)
    got, expected = inputs(batch, Sizes(0, 0, 0), device)
    assert got.token_ids.tolist() == list(range(134))
    assert torch.equal(got.kv_rows, expected.kv_rows)
    assert len(got.logit_rows) == 0


def test_a_step_of_nothing_is_all_padding(device: torch.device) -> None:
    packed = torch.zeros(8, dtype=torch.int32, device=device)
    got = prepare_inputs(packed, packed, Sizes(3, 2, 2), MAX_PAGES, PAGE_TOKENS)
    assert got.query_starts.tolist() == [0, 0, 0, 3]
    assert got.num_keys.tolist() == [0, 0, 0]
    assert got.kv_rows.tolist() == [-1, -1, -1]
    assert got.logit_rows.tolist() == [0, 0]
    moves = prepare_moves(packed, got, Sizes(3, 2, 2))
    assert moves.slots.tolist() == 3 * [[-1, -1, -1]]
    assert moves.sequences.tolist() == [2, 2, 2]
