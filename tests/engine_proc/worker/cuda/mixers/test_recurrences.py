"""Recurrences are torch's, token by token; neither chunks nor batch mates change a bit."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from drawn_moves import moves_of
from gpu_tests import first_of
from torch import Tensor

from headrace.engine_proc.worker.cuda.mixers import delta_rule, gated_delta_rule, ssd, ssm_scan
from headrace.engine_proc.worker.cuda.mixers.delta_rule import DeltaGates, apply_delta_rule
from headrace.engine_proc.worker.cuda.mixers.gated_delta_rule import apply_gated_delta_rule
from headrace.engine_proc.worker.cuda.mixers.ssd import scan_ssm
from headrace.engine_proc.worker.cuda.mixers.ssm_scan import SsmHeads, scan_channels
from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves
from headrace.engine_proc.worker.cuda.mixers.token_blocks import (
    BLOCK_TOKENS,
    MOST_ROWS,
    kept_rows,
    row_sizes,
)
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    GatedDeltaNetSpec,
    Mamba2Spec,
    MambaSpec,
)

NUM_SLOTS = 12
DELTA = GatedDeltaNetSpec(
    num_key_heads=2, num_value_heads=4, key_dim=9, value_dim=11, kernel_size=2
)
MAMBA2 = Mamba2Spec(
    num_heads=4,
    head_dim=10,
    state_size=7,
    num_groups=2,
    kernel_size=2,
    multipliers=(1.0, 1.0, 1.0, 1.0, 0.6),
)
SPECS = {
    "delta": DELTA,
    "delta as llama.cpp orders it": dataclasses.replace(DELTA, is_tiled=True),
    "delta of Kimi": dataclasses.replace(DELTA, gate_rank=3),
    "ssm": MAMBA2,
    "ssm, the second of three": dataclasses.replace(
        MAMBA2, num_heads=6, num_groups=3, local_heads=range(1, 4)
    ),
    "one head of delta": dataclasses.replace(DELTA, num_key_heads=1, num_value_heads=1),
    "one head of ssm": dataclasses.replace(MAMBA2, num_heads=1, num_groups=1),
    "channels": MambaSpec(channels=35, state_size=5, rank=3, kernel_size=2),
}
IN_BLOCKS = ["delta", "ssm"]
# Sequences of no token, one and many, new ones and drafts. Two of them pass ends of blocks.
PARTS = [(0, -1, 0), (1, 3, 1), (21, -1, 2), (1, -1, 5), (5, 4, 6), (2, 7, -1)]
FIRSTS = [0, 31, 0, 0, 13, 34]
Run = Callable[[Tensor, Tensor, StateMoves], Tensor]


class Case(NamedTuple):
    ours: Run
    theirs: Run
    width: int  # of rows
    num: int  # numbers of matrices or vectors
    spec: GatedDeltaNetSpec | Mamba2Spec | MambaSpec

    def states(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return slots that lie apart. Steps of tokens are positive."""
        torch.manual_seed(0)
        sizes = row_sizes(self.spec)
        num = self.num + (0 if sizes is None else sizes.numbers(dtype))
        states = torch.randn(NUM_SLOTS, 8 + num + 4, device=device)[:, 8:-4]
        if sizes is not None:
            kept_rows(sizes, states, dtype).steps.abs_()
        return states

    def of_slot(
        self, states: Tensor, slot: int, position: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return what counts of a slot whose state ends before a position."""
        sizes = row_sizes(self.spec)
        parts = [states[slot, : self.num]]
        if sizes is not None:
            kept = kept_rows(sizes, states, dtype)
            rows = range(position % BLOCK_TOKENS)
            parts += [part.float() for row in rows for part in kept.of_token(slot, row)]
        return torch.cat(parts)


def case(name: str, device: torch.device) -> Case:
    """Return a kernel and its reference."""
    spec = SPECS[name]
    torch.manual_seed(1)
    if isinstance(spec, GatedDeltaNetSpec):
        heads, decays = spec.num_value_heads, spec.num_decays
        bias, rates = torch.randn(decays, device=device), -torch.rand(heads, device=device)
        width = 2 * spec.key_width + spec.value_width

        def of_delta(function: Callable[..., Tensor]) -> Run:
            def run(rows: Tensor, states: Tensor, moves: StateMoves) -> Tensor:
                qkv = rows[:, :width].contiguous()
                betas, steps = rows[:, width:].float().split_with_sizes((heads, decays), 1)
                return function(spec, qkv, DeltaGates(betas, steps, bias, rates), states, moves)

            return run

        functions = (apply_gated_delta_rule, gated_delta_rule.reference)
        if spec.gate_rank:
            functions = (apply_delta_rule, delta_rule.reference)
        ours, theirs = map(of_delta, functions)
        return Case(ours, theirs, width + heads + decays, spec.key_dim * spec.value_width, spec)
    if isinstance(spec, MambaSpec):
        return case_of_channels(spec, device)
    width = spec.inner_size + 2 * spec.group_numbers
    bias, decay, skip = torch.randn(3, len(spec.heads), device=device)
    heads_of = SsmHeads(bias, -decay.abs(), skip)

    def of_ssm(function: Callable[..., Tensor]) -> Run:
        def run(rows: Tensor, states: Tensor, moves: StateMoves) -> Tensor:
            xbc = rows[:, :width].contiguous()
            return function(spec, xbc, rows[:, width:], heads_of, states, moves)

        return run

    num = spec.inner_size * spec.state_size
    return Case(of_ssm(scan_ssm), of_ssm(ssd.reference), width + len(spec.heads), num, spec)


def case_of_channels(spec: MambaSpec, device: torch.device) -> Case:
    num, size = spec.channels, spec.state_size
    bias, skip = torch.randn(2, num, device=device)
    channels = SsmHeads(bias, -torch.rand(num * size, device=device), skip)

    def of(function: Callable[..., Tensor]) -> Run:
        def run(rows: Tensor, states: Tensor, moves: StateMoves) -> Tensor:
            parts = rows.split_with_sizes((num, 2 * size, num), 1)
            return function(spec, *parts, channels, states, moves)

        return run

    return Case(of(scan_channels), of(ssm_scan.reference), 2 * num + 2 * size, num * size, spec)


@pytest.mark.parametrize("name", [name for name in SPECS if "one head" not in name])
def test_recurrences_and_their_states_are_those_of_torch(name: str, device: torch.device) -> None:
    own, drafts = case(name, device), [0, 0, 0, 0, 2, 0]
    moves = moves_of(PARTS, num_drafts=drafts, num_padding=(3, 2), firsts=FIRSTS, device=device)
    rows = torch.randn(len(moves.sequences), own.width, device=device)
    states = own.states(device)
    found, expected = states.clone(), states.clone()
    out, out_expected = own.ours(rows, found, moves), own.theirs(rows, expected, moves)
    torch.testing.assert_close(out, out_expected, atol=1e-5, rtol=1e-4)
    assert not out[-3:].any()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    written = [0, 1, 2, 5, 6]
    assert [i for i in range(NUM_SLOTS) if not torch.equal(found[i], states[i])] == written[1:]


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_rows_in_bf16_are_kept_in_bf16_and_summed_in_fp32(name: str, device: torch.device) -> None:
    """What a delta net adds is rounded, so the next token may be, too."""
    own, dtype = case(name, device), torch.bfloat16
    rows, states = torch.randn(23, own.width, device=device).to(dtype), own.states(device, dtype)
    moves = moves_of([(23, -1, 3)], device=device)
    found, expected = states.clone(), states.clone()
    out, out_expected = own.ours(rows, found, moves), own.theirs(rows, expected, moves)
    assert out.dtype == torch.float32
    tolerance = 1e-5 if name == "ssm" else 2e-2
    torch.testing.assert_close(out, out_expected, atol=tolerance, rtol=1e-4)
    ends = (own.of_slot(numbers, 3, 23, dtype) for numbers in (found, expected))
    torch.testing.assert_close(*ends, atol=tolerance, rtol=1e-4)


@pytest.mark.parametrize("name", ["one head of delta", "one head of ssm", "channels"])
def test_a_prompt_cut_anywhere_has_the_same_bits(name: str, device: torch.device) -> None:
    """Its tokens are three blocks."""
    own, dtype = case(name, device), torch.bfloat16
    length = 5 if name == "channels" else 34
    rows, states = (
        torch.randn(length, own.width, device=device).to(dtype),
        own.states(device, dtype),
    )
    whole = own.ours(rows, states, moves_of([(length, -1, 0)], device=device))
    for cut in first_of(6, sorted(range(1, length), key=lambda cut: (cut + 1) % BLOCK_TOKENS)):
        begun = own.ours(rows[:cut], states, moves_of([(cut, -1, 2)], device=device))
        rest = moves_of([(length - cut, 2, 3)], firsts=[cut], device=device)
        ended = own.ours(rows[cut:], states, rest)
        assert torch.equal(torch.cat([begun, ended]), whole), cut
        assert torch.equal(*(own.of_slot(states, i, length, dtype) for i in (3, 0))), cut


@pytest.mark.parametrize("name", ["delta", "ssm", "channels"])
def test_mates_change_no_bit_of_a_recurrence(name: str, device: torch.device) -> None:
    """A mate's chunk begins within a block."""
    own, length, cut = case(name, device), 20, 6
    rows = torch.randn(length, own.width, device=device)
    other, states = torch.randn(5, own.width, device=device), own.states(device)
    whole = own.ours(rows, states, moves_of([(length, -1, 0)], device=device))
    first = moves_of([(2, -1, 1), (cut, -1, 2)], device=device)
    begun = own.ours(torch.cat([other[:2], rows[:cut]]), states, first)
    second = moves_of([(length - cut, 2, 3), (3, 1, 4)], firsts=[cut, 2], device=device)
    ended = own.ours(torch.cat([rows[cut:], other[2:]]), states, second)
    assert torch.equal(torch.cat([begun[2:], ended[: length - cut]]), whole)
    assert torch.equal(*(own.of_slot(states, i, length) for i in (3, 0)))


@pytest.mark.parametrize("name", first_of(1, ["one head of delta", "one head of ssm"]))
def test_a_prompt_computed_again_has_the_bits_of_its_answers(
    name: str, device: torch.device
) -> None:
    """Token by token, with drafts that are wrong, through the end of a block and its beginning."""
    own, length, dtype = case(name, device), 35, torch.bfloat16
    rows, states = (
        torch.randn(length, own.width, device=device).to(dtype),
        own.states(device, dtype),
    )
    wrong = torch.randn(3, own.width, device=device).to(dtype)
    whole = own.ours(rows, states, moves_of([(length, -1, 0)], device=device))
    own.ours(rows[:13], states, moves_of([(13, -1, 2)], device=device))
    for place in range(13, length):
        source, target = 2 + (place - 13) % 2, 2 + (place - 12) % 2
        step = moves_of([(4, source, target)], num_drafts=[3], firsts=[place], device=device)
        before = own.of_slot(states, source, place, dtype)
        for _ in range(2):  # a step may be run again
            out = own.ours(torch.cat([rows[place : place + 1], wrong]), states, step)
            assert torch.equal(out[0], whole[place]), place
            assert torch.equal(own.of_slot(states, source, place, dtype), before)
    assert torch.equal(*(own.of_slot(states, i, length, dtype) for i in (target, 0)))


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_numbers_that_a_slot_has_from_others_are_not_read(name: str, device: torch.device) -> None:
    own = case(name, device)
    rows, states = torch.randn(20, own.width, device=device), own.states(device)
    whole = own.ours(rows, states, moves_of([(20, -1, 0)], device=device))
    own.ours(rows[:17], states, moves_of([(17, -1, 1)], device=device))
    sizes = row_sizes(own.spec)
    assert sizes is not None
    kept = kept_rows(sizes, states, torch.float32)
    for row in range(1, MOST_ROWS):
        for numbers in kept.of_token(1, row):
            numbers.fill_(torch.nan)
    rest = own.ours(rows[17:], states, moves_of([(3, 1, 2)], firsts=[17], device=device))
    assert torch.equal(rest, whole[17:])


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_a_step_of_padding_changes_no_state(name: str, device: torch.device) -> None:
    own = case(name, device)
    rows, states = torch.randn(4, own.width, device=device), own.states(device)
    before = states.clone()
    assert len(own.ours(rows, states, moves_of([], num_padding=(4, 2), device=device))) == 4
    assert len(own.ours(rows[:0], states, moves_of([], num_padding=(0, 2), device=device))) == 0
    assert torch.equal(states, before)
