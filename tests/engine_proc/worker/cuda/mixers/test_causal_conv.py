"""Convolutions behind states are torch's; neither chunks nor batch mates change a bit."""

import dataclasses

import pytest
import torch
from drawn_moves import moves_of
from torch import Tensor

from headrace.engine_proc.worker.cuda.mixers.causal_conv import causal_conv, reference

NUM_SLOTS = 12
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def numbers(
    num_tokens: int,
    channels: int,
    kernel_size: int,
    is_gated: bool,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows, weights, biases and states behind which others lie."""
    torch.manual_seed(0)
    x = torch.randn(num_tokens, channels * (3 if is_gated else 1) + 5)[:, :-5]
    weight, bias = torch.randn(kernel_size, channels), torch.randn(channels)
    states = torch.randn(NUM_SLOTS, 7 + (kernel_size - 1) * channels + 3)[:, 7:]
    return x.to(device, dtype), weight.to(device), bias.to(device), states.to(device)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("channels", "kernel_size", "dtype"),
    [(300, 4, torch.float32), (70, 2, torch.float32), (96, 3, torch.bfloat16)],
)
def test_convolutions_and_their_states_are_those_of_torch(
    channels: int, kernel_size: int, dtype: torch.dtype, is_gated: bool, device: torch.device
) -> None:
    """Sequences of no token, one and many, new ones and drafts."""
    moves = moves_of(
        [(0, -1, 0), (1, 3, 1), (6, -1, 2), (1, -1, 5), (5, 4, 6), (2, 7, -1)],
        num_drafts=[0, 0, 0, 0, 2, 0],
        num_padding=(3, 2),
        device=device,
    )
    num_tokens = len(moves.sequences)
    x, weight, bias, states = numbers(num_tokens, channels, kernel_size, is_gated, device, dtype)
    for own in (bias, None):
        ours, theirs = states.clone(), states.clone()
        found = causal_conv(x, weight, own, ours, moves, is_gated=is_gated)
        expected = reference(x, weight, own, theirs, moves, is_gated=is_gated)
        tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
        torch.testing.assert_close(found[:-3], expected[:-3], **tolerance)
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
        assert not torch.equal(ours, states)


@pytest.mark.parametrize("is_gated", [False, True])
def test_chunks_and_mates_change_no_bit_of_a_convolution(
    is_gated: bool, device: torch.device
) -> None:
    length = 9
    x, weight, bias, states = numbers(length, 40, 4, is_gated, device)
    other = torch.randn(8, x.shape[1], device=device)

    def run(rows: Tensor, parts: list[tuple[int, int, int]]) -> Tensor:
        moves = moves_of(parts, device=device)
        return causal_conv(rows, weight, bias, states, moves, is_gated=is_gated)

    whole = run(x, [(length, -1, 0)])
    state = states[0].clone()
    for cut in (1, 2, 5, 8):
        first = run(torch.cat([other[:3], x[:cut]]), [(3, -1, 1), (cut, -1, 2)])
        rows = torch.cat([x[cut:], other[3:]])
        second = run(rows, [(length - cut, 2, 3), (5, 1, 4)])
        assert torch.equal(torch.cat([first[3:], second[: length - cut]]), whole), cut
        assert torch.equal(states[3, : 3 * 40], state[: 3 * 40]), cut


def test_a_token_may_write_the_slot_that_it_reads(device: torch.device) -> None:
    x, weight, _, states = numbers(2, 40, 4, True, device)
    apart = states.clone()
    in_place = causal_conv(
        x, weight, None, states, moves_of([(1, 3, 3), (1, 5, 5)], device=device), is_gated=True
    )
    moves = moves_of([(1, 3, 4), (1, 5, 6)], device=device)
    assert torch.equal(in_place, causal_conv(x, weight, None, apart, moves, is_gated=True))
    assert torch.equal(states[3], torch.cat([apart[4, :120], states[3, 120:]]))


def test_a_step_of_padding_moves_no_state(device: torch.device) -> None:
    x, weight, _, states = numbers(5, 40, 3, True, device)
    before = states.clone()
    moves = moves_of([], num_padding=(5, 2), device=device)
    assert causal_conv(x, weight, None, states, moves, is_gated=True).shape == (5, 40)
    nothing = dataclasses.replace(moves, sequences=moves.sequences[:0])
    assert causal_conv(x[:0], weight, None, states, nothing, is_gated=True).shape == (0, 40)
    assert torch.equal(states, before)
