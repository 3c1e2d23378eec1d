"""Embeddings of tokens for each layer, and how a layer's activated gates meet them."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import rms_norm

from headrace.engine_proc.worker.cuda.kernels.gated_activation import KINDS, activate
from headrace.engine_proc.worker.cuda.kernels.gated_activation import reference as act_in_torch
from headrace.engine_proc.worker.cuda.kernels.numerics import (
    RMS,
    cdiv,
    next_power_of_2,
    rounded,
)
from headrace.engine_proc.worker.cuda.residuals.normed_sum import normed_row
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation

BLOCK_NUMBERS = 1024  # of a program, if a layer does not have more
ROOT_HALF = tl.constexpr(math.sqrt(0.5))


def layer_inputs(context: Tensor, embeds: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `(norm(context) + embeds * sqrt(size)) / sqrt(2)`, layer by layer, rounded once.

    Args:
        context, embeds: [tokens, layers * size], of one type.
        weight: [size], fp32.
    """
    size = len(weight)
    num_rows = context.numel() // size
    assert context.shape == embeds.shape
    assert context.is_contiguous()
    assert embeds.is_contiguous()
    out = torch.empty_like(context)
    if num_rows:
        block = next_power_of_2(size)
        block_rows = max(1, BLOCK_NUMBERS // block)
        layer_inputs_kernel[(cdiv(num_rows, block_rows),)](
            out,
            context,
            embeds,
            weight,
            eps,
            size**0.5,
            num_rows,
            SIZE=size,
            BLOCK=block,
            BLOCK_ROWS=block_rows,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def layer_inputs_kernel(
    out: tl.tensor,
    context: tl.tensor,
    embeds: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    multiplier: tl.tensor,
    num_rows: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)
    at = row * SIZE + column[None, :]
    is_number = (row < num_rows) & (column < SIZE)[None, :]
    total = normed_row(context + at, weight + column, column < SIZE, is_number, eps, SIZE, RMS)
    total += tl.load(embeds + at, mask=is_number, other=0.0).to(tl.float32) * multiplier
    tl.store(out + at, rounded(total * ROOT_HALF, out.dtype.element_ty), mask=is_number)


def meet_inputs(gates: Tensor, inputs: Tensor, layer: int, activation: Activation) -> Tensor:
    """Return `act(gates) * inputs` of a layer, in fp32, rounded once.

    Args:
        gates: [tokens, size]
        inputs: [tokens, layers * size]
    """
    num_tokens, size = gates.shape
    assert gates.is_contiguous()
    assert inputs.is_contiguous()
    out = torch.empty_like(gates)
    if num_tokens:
        block = next_power_of_2(size)
        block_rows = max(1, BLOCK_NUMBERS // block)
        meet_inputs_kernel[(cdiv(num_tokens, block_rows),)](
            out,
            gates,
            inputs[:, layer * size :],
            inputs.stride(0),
            num_tokens,
            SIZE=size,
            BLOCK=block,
            BLOCK_ROWS=block_rows,
            KIND=KINDS.index(activation),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def meet_inputs_kernel(
    out: tl.tensor,
    gates: tl.tensor,
    inputs: tl.tensor,
    stride: tl.tensor,
    num_tokens: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    token = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_number = (token < num_tokens) & (column < SIZE)
    gate = tl.load(gates + token * SIZE + column, mask=is_number, other=0.0).to(tl.float32)
    own = tl.load(inputs + token * stride + column, mask=is_number, other=0.0).to(tl.float32)
    met = rounded(activate(gate, KIND) * own, out.dtype.element_ty)
    tl.store(out + token * SIZE + column, met, mask=is_number)


def reference_inputs(context: Tensor, embeds: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do as `layer_inputs`, in plain torch."""
    size = len(weight)
    normed = rms_norm(context.float().view(-1, size), (size,), weight, eps).view_as(context)
    total = (normed + embeds.float() * float(size**0.5)) * float(ROOT_HALF.value)
    return total.to(context.dtype)


def reference_met(gates: Tensor, inputs: Tensor, layer: int, activation: Activation) -> Tensor:
    """Do as `meet_inputs`, in plain torch."""
    own = inputs.view(len(gates), -1, gates.shape[1])[:, layer]
    return act_in_torch(torch.cat([gates, own], 1), activation)
