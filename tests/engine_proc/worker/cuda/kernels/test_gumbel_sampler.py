"""The tokens drawn are those of the C++ sampler."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from gpu_tests import first_of
from reference_sampler import Rows, make_rows

from headrace.engine_proc.worker.cuda.kernels import (
    gumbel_sampler,
    row_limits,
    top_k_top_p,
    vocab_slices,
)
from headrace.engine_proc.worker.cuda.kernels.gumbel_sampler import Draws, draw, reference
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import new_turns
from headrace.engine_proc.worker.execution.cpu_sampler import Sampler
from headrace.engine_proc.worker.execution.executor import Floats

VOCAB_SIZE = 200
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "all tokens": {"temperature": 1.3},
    "cold": {"temperature": 1e-30},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.05},
    "min_p of one": {"min_p": 1},
    "top_k and top_p": {"top_k": 20, "top_p": 0.9, "temperature": 2},
    "all three": {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 3},
    "next to nothing": {"top_p": 1e-9},
    "large seeds": {"seed": 2**64 - 3, "position": 2**64 - 9},
}


def draws_of(rows: Rows, device: torch.device) -> Draws:
    def column(name: str) -> torch.Tensor:
        numbers = rows[name]
        if numbers.dtype == "u8":  # which torch does not sample with
            numbers = numbers.view("i8")
        return torch.from_numpy(numbers.copy()).to(device)

    return Draws(**{one.name: column(one.name) for one in dataclasses.fields(Draws)})


def assert_same(logits: Floats, rows: Rows, device: torch.device) -> None:
    tokens, _ = Sampler(logits.shape[1], threads=1).sample(logits, rows)
    draws, on_device = draws_of(rows, device), torch.from_numpy(logits).to(device)
    assert reference(on_device, draws).tolist() == tokens.tolist()
    assert draw(on_device, draws).tolist() == tokens.tolist()


@pytest.mark.parametrize("name", FIELDS)
def test_tokens_are_those_of_the_cpp_sampler(name: str, device: torch.device) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (2, VOCAB_SIZE)).astype(np.float32)
    assert_same(logits, make_rows(2, **FIELDS[name]), device)


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0}])
def test_equals_and_impossible_tokens(fields: dict[str, Any], device: torch.device) -> None:
    logits = np.full((5, 40), -2, np.float32)
    logits[0, 10:] = -np.inf
    logits[1] = -np.inf
    logits[2, ::3] = np.nan
    logits[3, 7::5] = 9
    logits[4, :20] = 0.0
    logits[4, 20:] = -0.0
    assert_same(logits, make_rows(5, **fields), device)


@pytest.mark.parametrize("vocab_size", [1, 2, 2100])  # the last in two blocks
def test_small_and_large_vocabularies(vocab_size: int, device: torch.device) -> None:
    logits = np.random.default_rng(1).normal(0, 1, (2, vocab_size)).astype(np.float32)
    assert_same(logits, make_rows(2, top_p=0.9), device)


@pytest.mark.parametrize(
    "fields", first_of(1, [{"top_k": 50, "top_p": 0.4}, {"top_k": 30}, {"top_p": 0.7}])
)
def test_limits_among_more_tokens_than_a_program_holds(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(vocab_slices, "BLOCK", 16)
    logits = np.random.default_rng(2).normal(0, 1, (4, 70)).astype(np.float32)
    logits[1] = 1.0  # by the order of tokens alone
    logits[2] = logits[2].round()
    logits[3] *= 1e-6
    assert_same(logits, make_rows(4, temperature=2, **fields), device)


def test_a_row_that_programs_share_has_the_token_of_one_alone(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The last to store its slice's best draws the token, and leaves the counters as they were."""
    monkeypatch.setattr(vocab_slices, "BLOCK", 16)
    logits = np.random.default_rng(4).normal(0, 1, (5, VOCAB_SIZE)).astype(np.float32)
    rows = make_rows(5)
    rows["temperature"], rows["min_p"] = [1, 5, 9, 0, 2], [0, 0, 0.1, 0, 0.3]
    tokens, _ = Sampler(VOCAB_SIZE, threads=1).sample(logits, rows)
    draws, on_device = draws_of(rows, device), torch.from_numpy(logits).to(device)
    turns = new_turns(5, device)
    for _ in range(2):
        drawn = draw(on_device, draws, turns=turns, has_limits=False)
        assert drawn.tolist() == tokens.tolist()
        assert not turns.any()
    assert len({int(token) // 16 for token in tokens}) > 1  # in slices of one block


def num_calls(name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> float:
    """Return how often a row has something done to each of its 25 blocks."""
    vocab_size, block = 800, 32
    calls = []

    def counted(own: Any) -> Any:
        return lambda *args: (calls.append(name), own(*args))[1]

    logits = np.random.default_rng(3).normal(0, 3, (1, vocab_size)).astype(np.float32)
    rows, device = make_rows(1, temperature=1, **fields), torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(vocab_slices, "BLOCK", block)
        for module in (gumbel_sampler, row_limits, top_k_top_p, vocab_slices):
            if hasattr(module, name):
                patch.setattr(module, name, counted(getattr(module, name)))
        draw(torch.from_numpy(logits), draws_of(rows, device), has_limits=bool(fields))
    return len(calls) / (vocab_size / block)


def test_top_p_of_few_tokens_takes_no_pass(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    if device.type == "cuda":
        pytest.skip("calls are counted in the interpreter")
    passes = num_calls("load_block", {"top_k": 20}, monkeypatch)
    assert passes == 4  # the likeliest, two to the bracket, its tokens
    assert num_calls("load_block", {"top_k": 20, "top_p": 0.9}, monkeypatch) == passes


def test_noise_is_for_blocks_above_the_limit(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    if device.type == "cuda":
        pytest.skip("calls are counted in the interpreter")
    assert num_calls("uniform_of", {}, monkeypatch) > 1  # all blocks, and the likeliest token
    assert num_calls("uniform_of", {"top_p": 0.3}, monkeypatch) < 0.5
    assert num_calls("uniform_of", {"top_k": 20}, monkeypatch) == 1 / 25


def test_no_rows_draw_nothing(device: torch.device) -> None:
    logits = torch.empty(0, 9, device=device)
    assert draw(logits, draws_of(make_rows(0), device)).shape == (0,)
