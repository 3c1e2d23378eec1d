"""Limits keep the reference's tokens, however programs share a row and in whatever order."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gpu_tests import first_of
from reference_sampler import make_rows
from triton.runtime.interpreter import InterpreterBuilder, interpreter_builder

from headrace.engine_proc.worker.cuda.kernels import row_limits, top_k_top_p, vocab_slices
from headrace.engine_proc.worker.cuda.kernels.gumbel_sampler import Draws, candidates
from headrace.engine_proc.worker.cuda.kernels.row_limits import RowLimits, find_limits
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import new_turns
from headrace.engine_proc.worker.cuda.kernels.vocab_slices import find_likeliest
from headrace.engine_proc.worker.cuda.row_draws import draws_of

Logits = npt.NDArray[np.float32]

BLOCK, VOCAB_SIZE = 8, 37  # five slices, the last of five tokens
TOKEN_BITS = 6
NORMAL = np.random.default_rng(5).normal(0, 2, VOCAB_SIZE).astype(np.float32)
TWO = np.where(np.arange(VOCAB_SIZE) % 3, np.float32(1), np.nextafter(np.float32(1), np.float32(2)))


def among(tokens: dict[int, float], others: float) -> Logits:
    logits = np.full(VOCAB_SIZE, others, np.float32)
    logits[list(tokens)] = list(tokens.values())
    return logits


CASES: dict[str, tuple[Logits, dict[str, float]]] = {
    "as many as a program holds": (NORMAL, {"top_k": BLOCK}),
    "one more, of which top-p leaves some": (NORMAL, {"top_k": BLOCK + 1, "top_p": 0.6}),
    "top-p of few": (NORMAL, {"top_k": 5, "top_p": 0.7}),
    "hot": (NORMAL, {"top_p": 0.9, "temperature": 100}),
    "fewer than top-k": (among({3: 1, 30: 2}, -np.inf), {"top_k": 9}),
    "one huge": (among({20: 3e38}, 0), {"top_k": 3}),
    "nothing": (NORMAL, {"top_p": 0}),
    "next to nothing": (NORMAL, {"top_p": 1e-9}),
    "far below": (-90 * NORMAL**2, {"top_k": 7}),
    "top-p beside min-p": (NORMAL, {"top_p": 0.9, "min_p": 0.2}),
    "equals at the limit": (NORMAL.round(), {"top_k": 6}),
    "nearly all": (NORMAL, {"top_p": 1 - 2**-24}),
    "all but one": (NORMAL, {"top_k": VOCAB_SIZE - 1}),
    "all equal, counted": (among({}, -3), {"top_k": 11}),
    "all equal, weighed": (among({}, 2), {"top_p": 0.4}),
    "two neighbours": (TWO, {"top_k": 20}),
    "not a number": (among({1: 5, 9: 4, 36: 4.5}, np.nan), {"top_k": 2}),
    "cold": (NORMAL, {"top_p": 0.5, "temperature": 1e-30}),
}
ARE_LEFT = ["as many as a program holds", "top-p of few", "nothing", "next to nothing"]
ARE_LEFT += ["top-p beside min-p", "fewer than top-k", "not a number", "far below", "cold"]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_slices, "BLOCK", BLOCK)


def limits_of(names: Sequence[str], device: torch.device) -> tuple[torch.Tensor, Draws, RowLimits]:
    """Find the limits of some cases, a row each."""
    rows = make_rows(len(names))
    for row, name in enumerate(names):
        for field, value in CASES[name][1].items():
            rows[field][row] = value
    logits = torch.from_numpy(np.stack([CASES[name][0] for name in names])).to(device)
    columns = torch.from_numpy(rows.view(np.int32).reshape(len(names), -1)).to(device)
    draws, turns = draws_of(columns), new_turns(len(names), device)
    filters = draws.temperature, draws.top_k, draws.top_p, draws.min_p
    found = find_limits(logits, *find_likeliest(logits), filters, turns)
    assert not turns.any()
    return logits, draws, found


def rank_of(logits: torch.Tensor) -> torch.Tensor:
    """Do as the kernels' own, for a row."""
    bits = (logits + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, ~bits & 0xFFFFFFFF, bits | 1 << 31)
    place = torch.arange(VOCAB_SIZE - 1, -1, -1, device=logits.device)
    return order << TOKEN_BITS | place


@pytest.mark.parametrize("name", first_of(11, list(CASES)))
def test_limits_keep_what_the_reference_keeps(name: str, device: torch.device) -> None:
    logits, draws, found = limits_of([name], device)
    row = logits[0].nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    scores = row.double() / draws.temperature[0].double()
    expected = candidates(scores, draws, 0)
    ranks = rank_of(row)
    is_in = (ranks >= found.limits[0]) & (row > float("-inf"))
    if draws.min_p[0] > 0:
        is_in &= scores - scores.max() >= draws.min_p[0].double().log()
    is_possible = row[expected] > float("-inf")
    assert is_in.nonzero()[:, 0].tolist() == sorted(expected[is_possible].tolist())
    num_left = int(found.num_left[0])
    assert (0 < num_left <= BLOCK) == (name in ARE_LEFT)
    left = found.left[0, :num_left].tolist()
    assert left == [rank for rank in ranks.tolist() if rank in left], "in the order of tokens"
    assert num_left == 0 or set(ranks[is_in].tolist()) <= set(left)


def reversed_programs(own: Callable[..., None]) -> Callable[..., None]:
    def set_grid_idx(self: InterpreterBuilder, x: int, y: int, z: int) -> None:
        num_rows, num_slices, _ = self.grid_dim
        own(self, num_rows - 1 - x, num_slices - 1 - y, z)

    return set_grid_idx


def test_limits_have_the_same_bits_in_any_order_and_batch(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    names = first_of(2, ["hot", "top-p beside min-p", "two neighbours", "nearly all"])
    alone = [limits_of([name], device)[2] for name in names]
    if device.type == "cpu":
        turned = reversed_programs(InterpreterBuilder.set_grid_idx)
        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", turned)
    together = limits_of(names, device)[2]
    for row, one in enumerate(alone):
        assert together.limits[row] == one.limits[0]
        num_left = int(one.num_left[0])
        assert int(together.num_left[row]) == num_left
        assert together.left[row, :num_left].tolist() == one.left[0, :num_left].tolist()


def blocks_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return which program has loaded a block, and where the block begins."""
    loaded: list[tuple[int, int]] = []

    def load_block(logits: Any, first: Any, vocab_size: Any, block: Any) -> Any:
        loaded.append((interpreter_builder.grid_idx[1], int(first)))
        return own(logits, first, vocab_size, block)

    own = top_k_top_p.load_block
    with monkeypatch.context() as patch:
        for module in (row_limits, top_k_top_p):
            patch.setattr(module, "load_block", load_block)
        limits_of([name], torch.device("cpu"))
    return loaded


def test_programs_look_at_slices_of_their_own(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    if device.type == "cuda":
        pytest.skip("calls are seen in the interpreter")
    for name, num_passes in {"top-p of few": 1, "hot": 3}.items():
        loaded = blocks_of(name, monkeypatch)
        assert {(index, first) for index, first in loaded} == {(i, i * BLOCK) for i in range(5)}
        assert len(loaded) == 5 * (num_passes + 1), name  # and one to write the bracket apart
    for name in ("one more, of which top-p leaves some", "one huge"):
        loaded = blocks_of(name, monkeypatch)
        assert len({index for index, first in loaded if first != index * BLOCK}) == 1, name
        assert name == "one huge" or len(loaded) == 5 * 4  # weighed, written; by one again
