"""Recurrences are torch's, token by token; neither chunks nor batch mates change a bit."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from drawn_moves import moves_of
from torch import Tensor

from headrace.engine_proc.worker.cuda.mixers import delta_rule, ssm_scan
from headrace.engine_proc.worker.cuda.mixers.delta_rule import DeltaGates, apply_delta_rule
from headrace.engine_proc.worker.cuda.mixers.ssm_scan import SsmHeads, scan_channels, scan_ssm
from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves
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
    "channels": MambaSpec(channels=35, state_size=5, rank=3, kernel_size=2),
}
# Sequences of no token, one and many, new ones and drafts.
PARTS = [(0, -1, 0), (1, 3, 1), (6, -1, 2), (1, -1, 5), (5, 4, 6), (2, 7, -1)]
Run = Callable[[Tensor, Tensor, StateMoves], Tensor]


def runs(name: str, device: torch.device) -> tuple[Run, Run, int, int]:
    """Return a kernel and its reference, and how many numbers rows and states have."""
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

        sizes = width + heads + decays, spec.key_dim * spec.value_width
        return of_delta(apply_delta_rule), of_delta(delta_rule.reference), *sizes
    if isinstance(spec, MambaSpec):
        return runs_of_channels(spec, device)
    width = spec.inner_size + 2 * spec.group_numbers
    bias, decay, skip = torch.randn(3, len(spec.heads), device=device)
    heads_of = SsmHeads(bias, -decay.abs(), skip)

    def of_ssm(function: Callable[..., Tensor]) -> Run:
        def run(rows: Tensor, states: Tensor, moves: StateMoves) -> Tensor:
            xbc = rows[:, :width].contiguous()
            return function(spec, xbc, rows[:, width:], heads_of, states, moves)

        return run

    sizes = width + len(spec.heads), spec.inner_size * spec.state_size
    return of_ssm(scan_ssm), of_ssm(ssm_scan.reference), *sizes


def runs_of_channels(spec: MambaSpec, device: torch.device) -> tuple[Run, Run, int, int]:
    num, size = spec.channels, spec.state_size
    bias, skip = torch.randn(2, num, device=device)
    channels = SsmHeads(bias, -torch.rand(num * size, device=device), skip)

    def of(function: Callable[..., Tensor]) -> Run:
        def run(rows: Tensor, states: Tensor, moves: StateMoves) -> Tensor:
            parts = rows.split_with_sizes((num, 2 * size, num), 1)
            return function(spec, *parts, channels, states, moves)

        return run

    kernel, reference = of(scan_channels), of(ssm_scan.channels_reference)
    return kernel, reference, 2 * num + 2 * size, num * size


def drawn(num_rows: int, width: int, num: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows, and states that lie apart."""
    torch.manual_seed(0)
    states = torch.randn(NUM_SLOTS, 7 + num + 3, device=device)[:, 7:-3]
    return torch.randn(num_rows, width, device=device), states


@pytest.mark.parametrize("name", SPECS)
def test_recurrences_and_their_states_are_those_of_torch(name: str, device: torch.device) -> None:
    ours, theirs, width, num = runs(name, device)
    drafts = [0, 0, 0, 0, 2, 0]
    moves = moves_of(PARTS, num_drafts=drafts, num_padding=(3, 2), device=device)
    rows, states = drawn(len(moves.sequences), width, num, device)
    found, expected = states.clone(), states.clone()
    out, out_expected = ours(rows, found, moves), theirs(rows, expected, moves)
    torch.testing.assert_close(out, out_expected, atol=1e-5, rtol=1e-4)
    assert not out[-3:].any()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    written = [0, 1, 2, 5, 6]
    assert [i for i in range(NUM_SLOTS) if not torch.equal(found[i], states[i])] == written[1:]


@pytest.mark.parametrize("name", ["delta", "ssm"])
def test_bf16_rows_are_summed_in_fp32(name: str, device: torch.device) -> None:
    ours, theirs, width, num = runs(name, device)
    rows, states = drawn(6, width, num, device)
    moves = moves_of([(6, 2, 3)], device=device)
    out = ours(rows.bfloat16(), states, moves)
    assert out.dtype == torch.float32
    expected = theirs(rows.bfloat16().float(), states, moves)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["delta", "ssm", "channels"])
def test_chunks_and_mates_change_no_bit_of_a_recurrence(name: str, device: torch.device) -> None:
    length = 5
    run, _, width, num = runs(name, device)
    rows, states = drawn(length, width, num, device)
    other = torch.randn(5, width, device=device)
    whole = run(rows, states, moves_of([(length, -1, 0)], device=device))
    for cut in (1, 3):
        first = moves_of([(2, -1, 1), (cut, -1, 2)], device=device)
        begun = run(torch.cat([other[:2], rows[:cut]]), states, first)
        second = moves_of([(length - cut, 2, 3), (3, 1, 4)], device=device)
        ended = run(torch.cat([rows[cut:], other[2:]]), states, second)
        assert torch.equal(torch.cat([begun[2:], ended[: length - cut]]), whole), cut
        assert torch.equal(states[3], states[0]), cut


@pytest.mark.parametrize("name", ["delta", "ssm"])
def test_a_recurrence_may_write_the_slot_that_it_reads(name: str, device: torch.device) -> None:
    run, _, width, num = runs(name, device)
    rows, states = drawn(5, width, num, device)
    apart = states.clone()
    out = run(rows, states, moves_of([(3, 4, 4), (2, 5, 5)], device=device))
    assert torch.equal(out, run(rows, apart, moves_of([(3, 4, 6), (2, 5, 7)], device=device)))
    assert torch.equal(states[4:6], apart[6:8])


@pytest.mark.parametrize("name", ["delta", "ssm"])
def test_a_step_of_padding_changes_no_state(name: str, device: torch.device) -> None:
    run, _, width, num = runs(name, device)
    rows, states = drawn(4, width, num, device)
    before = states.clone()
    assert len(run(rows, states, moves_of([], num_padding=(4, 2), device=device))) == 4
    assert len(run(rows[:0], states, moves_of([], num_padding=(0, 2), device=device))) == 0
    assert torch.equal(states, before)
