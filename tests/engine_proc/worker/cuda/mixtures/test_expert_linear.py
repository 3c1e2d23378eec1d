"""A product by expert is that of each row alone, bit by bit."""

import dataclasses

import pytest
import torch
from gpu_tests import first_of
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.gated_linear import gated_linear
from headrace.engine_proc.worker.cuda.kernels.linear import linear
from headrace.engine_proc.worker.cuda.mixtures.expert_activation import ExpertActivation
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import (
    ExpertWeights,
    activated_expert_linear,
    expert_linear,
    reference,
)
from headrace.engine_proc.worker.cuda.mixtures.expert_tiles import (
    MANY,
    ExpertTiles,
    most_tiles,
    sort_by_expert,
)
from headrace.engine_proc.worker.cuda.mixtures.router import ExpertChoice, choose_experts
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation, MixtureSpec

SILU = ExpertActivation(Activation.SILU)
CLAMPED = ExpertActivation(Activation.SILU, clamp=0.7, beta=1.702)
SQUARED = ExpertActivation(Activation.RELU2, is_gated=False)
OF_5 = MixtureSpec(num_experts=5, experts_per_token=2, intermediate_size=35)
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
HIDDEN = 70


def choose(num_tokens: int, device: torch.device) -> ExpertChoice:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_tokens, 5, generator=generator).to(device)
    return choose_experts(OF_5, logits, None, torch.zeros(num_tokens, device=device))


def draw(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.5).to(device, dtype)


def dense(weight: Tensor, bias: Tensor | None = None) -> ExpertWeights:
    return ExpertWeights(weight.flatten(0, 1), None if bias is None else bias.flatten())


def in_larger(tiles: ExpertTiles, choice: ExpertChoice) -> ExpertTiles:
    """Return tiles of 128 pairs."""
    own = dataclasses.replace(OF_5, local_experts=range(5))
    larger = sort_by_expert(own, choice, torch.float32)
    num = most_tiles(choice.num_pairs, 5, MANY.rows)
    lines = [
        (expert, first, min(first + MANY.rows, end))
        for expert in range(5)
        for first, end in [expert_range(larger, expert)]
        for first in range(first, end, MANY.rows)
    ]
    table = torch.tensor(lines, dtype=torch.int32, device=tiles.pairs.device)
    count = torch.tensor([len(lines)], dtype=torch.int32, device=tiles.pairs.device)
    padded = table.new_zeros(num, 3)
    padded[: len(lines)] = table
    return dataclasses.replace(larger, table=padded, count=count, tile=MANY)


def expert_range(tiles: ExpertTiles, expert: int) -> tuple[int, int]:
    lines = [line for line in tiles.table[: int(tiles.count)].tolist() if line[0] == expert]
    return lines[0][1], lines[-1][2]


@pytest.mark.parametrize("num_tokens", [0, 1, 90])
@pytest.mark.parametrize(
    ("has_bias", "dtype", "activation"),
    [
        (False, torch.float32, SILU),
        (True, torch.float32, CLAMPED),
        (True, torch.bfloat16, SILU),
        (False, torch.float16, CLAMPED),
        (True, torch.float32, SQUARED),
    ],
)
def test_products_by_expert_are_those_of_torch(
    num_tokens: int,
    has_bias: bool,
    dtype: torch.dtype,
    activation: ExpertActivation,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    choice = choose(num_tokens, device)
    tiles = sort_by_expert(OF_5, choice, dtype)
    x = torch.randn(num_tokens, HIDDEN).to(device, dtype)
    num = 35 * (1 + activation.is_gated)
    gates = draw(5, num, HIDDEN, device=device, dtype=dtype)
    downs = draw(5, HIDDEN, 35, device=device, dtype=dtype)
    biases = [draw(5, n, device=device, dtype=dtype) if has_bias else None for n in (num, HIDDEN)]
    inner = activated_expert_linear(x, dense(gates, biases[0]), tiles, activation)
    out = expert_linear(inner, dense(downs, biases[1]), tiles)
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    expected = reference(x, gates, biases[0], choice.experts, activation)
    torch.testing.assert_close(inner, expected, **tolerance)
    expected = reference(inner, downs, biases[1], choice.experts)
    torch.testing.assert_close(out, expected, **tolerance)


@pytest.mark.parametrize("dtype", first_of(1, [torch.bfloat16, torch.float32]))
def test_rows_have_the_bits_of_a_product_alone(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(90, HIDDEN).to(device, dtype)
    gates = draw(5, 70, HIDDEN, device=device, dtype=dtype)
    downs = draw(5, HIDDEN, 35, device=device, dtype=dtype)
    choice = choose(90, device)
    tiles = sort_by_expert(OF_5, choice, dtype)
    for own in (tiles, in_larger(tiles, choice)):
        inner = activated_expert_linear(x, dense(gates), own, SILU)
        out = expert_linear(inner, dense(downs), own)
        for token in (0, 57, 89):
            for slot, expert in enumerate(choice.experts[token].tolist()):
                pair = 2 * token + slot
                row = gated_linear(x[token : token + 1], gates[expert], None, Activation.SILU)
                assert torch.equal(inner[pair], row[0])
                assert torch.equal(out[pair], linear(row, downs[expert])[0])


def test_experts_that_are_elsewhere_are_not_computed(device: torch.device) -> None:
    mixture = dataclasses.replace(OF_5, local_experts=range(3, 5))
    choice = choose(9, device)
    tiles = sort_by_expert(mixture, choice, torch.float32)
    x = torch.randn(18, HIDDEN, device=device)
    weight = draw(5, 20, HIDDEN, device=device, dtype=torch.float32)
    whole = expert_linear(x, dense(weight), sort_by_expert(OF_5, choice, torch.float32))
    own = expert_linear(x, dense(weight[3:]), tiles)
    is_here = choice.experts.flatten() >= 3
    assert is_here.any() and not is_here.all()
    assert torch.equal(own[is_here], whole[is_here])
