"""A product by expert, in every format, is that of the expert's matrix alone, bit by bit."""

import dataclasses

import pytest
import torch
from quantized_experts import FORMATS
from torch import Tensor

from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.cuda.kernels.e4m3_rows import rounded_rows
from headrace.engine_proc.worker.cuda.kernels.gated_activation import act_mul
from headrace.engine_proc.worker.cuda.kernels.linear import linear
from headrace.engine_proc.worker.cuda.matrices.fp8 import Fp8Matrix, product
from headrace.engine_proc.worker.cuda.matrices.int4 import Int4Matrix
from headrace.engine_proc.worker.cuda.matrices.matrices import load_experts
from headrace.engine_proc.worker.cuda.matrices.upload import to_device
from headrace.engine_proc.worker.cuda.mixtures.expert_activation import ExpertActivation
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import (
    activated_expert_linear,
    expert_linear,
)
from headrace.engine_proc.worker.cuda.mixtures.expert_tiles import MANY, sort_by_expert
from headrace.engine_proc.worker.cuda.mixtures.router import choose_experts
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation, MixtureSpec

OF_3 = MixtureSpec(num_experts=3, experts_per_token=1, intermediate_size=48)
SQUARED = ExpertActivation(Activation.RELU2, is_gated=False)
SHAPE = (32, 160)  # gates and ups, of so many terms


def alone(weight: Weight, bias: Tensor, x: Tensor) -> Tensor:
    """Multiply with one matrix."""
    matrix = Int4Matrix.of([weight], bias, x.device) or Fp8Matrix.of([weight], bias, x.device)
    if isinstance(matrix, Fp8Matrix):
        return product(x, *rounded_rows(x, matrix.group_size), matrix)
    if matrix is not None:
        return matrix.apply(x)
    return linear(x, to_device([weight], x.device, x.dtype), bias)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8 by row", torch.float32),
        ("fp8 by block", torch.bfloat16),
        ("int4", torch.bfloat16),
        ("mxfp4", torch.bfloat16),
    ],
)
def test_rows_have_the_bits_of_a_matrix_alone(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    whole = FORMATS[name]((3 * SHAPE[0], SHAPE[1]))
    parts = [whole.rows(e * SHAPE[0], (e + 1) * SHAPE[0]) for e in range(3)]
    biases = torch.randn(3, SHAPE[0]).to(device, dtype)
    weights = load_experts(parts, biases.flatten(), device, dtype, "none")
    x = torch.randn(20, SHAPE[1]).to(device, dtype)
    logits = torch.randn(20, 3).to(device)
    choice = choose_experts(OF_3, logits, None, torch.zeros(20, device=device))
    tiles = sort_by_expert(OF_3, choice, dtype)
    larger = dataclasses.replace(tiles, tile=dataclasses.replace(MANY, rows=tiles.tile.rows))
    for own in (tiles, larger):
        out = expert_linear(x, weights, own)
        gated = activated_expert_linear(x, weights, own, ExpertActivation(Activation.SILU))
        squared = activated_expert_linear(x, weights, own, SQUARED)
        for token in (0, 7, 19):
            expert = int(choice.experts[token])
            row = alone(parts[expert], biases[expert], x[token : token + 1])
            assert torch.equal(out[token], row[0])
            assert torch.equal(gated[token], act_mul(row, Activation.SILU)[0])
            assert torch.equal(squared[token], act_mul(row, Activation.RELU2, is_gated=False)[0])
