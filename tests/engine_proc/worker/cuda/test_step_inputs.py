"""A step's inputs follow from who has how many tokens in it."""

import dataclasses

import torch

from headrace.engine_proc.worker.cuda.step_inputs import Slots, prepare_inputs, reference

PAGE_TOKENS = 16


def state(device: torch.device) -> Slots:
    torch.manual_seed(0)
    return Slots(
        page_table=torch.randperm(60).view(4, 15).int().to(device),
        num_computed=torch.tensor([31, 0, 7, 100]).int().to(device),
        last_tokens=torch.tensor([5, 6, 7, 8]).int().to(device),
    )


def test_prompts_tokens_and_padding(device: torch.device) -> None:
    counts = [1, 130, 0, 3]  # more than a block
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    given = torch.arange(sum(counts) + 2).int().to(device)
    given[0] = -1
    slots = torch.tensor([3, 1, 0, 2]).int().to(device)
    inputs = prepare_inputs(given, starts, slots, state(device), PAGE_TOKENS)
    expected = reference(given, starts, slots, state(device), PAGE_TOKENS)
    for field in dataclasses.fields(inputs):
        assert torch.equal(getattr(inputs, field.name), getattr(expected, field.name)), field.name
    assert inputs.token_ids[:2].tolist() == [8, 1]
    assert inputs.positions[[0, 1, 130, 131, -1]].tolist() == [100, 0, 129, 7, 0]
    assert inputs.kv_rows[-2:].tolist() == [-1, -1]
    assert inputs.num_keys.tolist() == [101, 130, 31, 10]


def test_an_empty_step(device: torch.device) -> None:
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    inputs = prepare_inputs(nothing, starts, nothing, state(device), PAGE_TOKENS)
    assert len(inputs.positions) == len(inputs.num_keys) == 0
