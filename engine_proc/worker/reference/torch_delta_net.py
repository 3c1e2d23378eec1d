"""The gated delta net of one sequence in plain torch, token by token."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.models.specs.decoder_spec import GatedDeltaNetSpec

L2_EPS = 1e-6


class DeltaTokens(NamedTuple):
    """What a sequence's tokens bring, by row, in fp32."""

    channels: Tensor  # of queries, keys and values, side by side, before the convolution
    decays: Tensor  # [tokens, value heads, key_dim or 1]
    betas: Tensor  # [tokens, value heads]


def run_sequence(
    delta: GatedDeltaNetSpec, kernels: Tensor, tokens: DeltaTokens, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what heads read, [tokens, value heads, value_dim], and the state behind them.

    Args:
        kernels: [channels, kernel_size].
        state: the columns that the convolution sees, then a matrix of each value head.
    """
    num_columns = delta.kernel_size - 1
    window = state[: num_columns * len(kernels)].view(num_columns, -1)
    matrices = state[num_columns * len(kernels) :].view(-1, delta.key_dim, delta.value_dim)
    columns = torch.cat([window, tokens.channels])
    convolved = F.silu(F.conv1d(columns.T[None], kernels[:, None], groups=len(kernels))[0].T)
    width = delta.key_width
    queries, keys = (
        of_length_one(part.reshape(len(part), -1, delta.key_dim))
        for part in (convolved[:, :width], convolved[:, width : 2 * width])
    )
    values = convolved[:, 2 * width :].reshape(len(convolved), -1, delta.value_dim)
    read, matrices = delta_rule(delta, queries, keys, values, tokens, matrices)
    return read, torch.cat([columns[-num_columns:].flatten(), matrices.flatten()])


def of_length_one(heads: Tensor) -> Tensor:
    """Divide each head by its length."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)


def delta_rule(
    delta: GatedDeltaNetSpec,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: DeltaTokens,
    matrices: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return what heads read, and their matrices behind the last token."""
    heads = torch.arange(delta.num_value_heads)
    group = delta.num_value_heads // delta.num_key_heads
    key_heads = heads % delta.num_key_heads if delta.is_tiled else heads // group
    queries, keys = queries[:, key_heads] / delta.key_dim**0.5, keys[:, key_heads]
    read = torch.empty_like(values)
    for i, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
        matrices = matrices * tokens.decays[i, :, :, None]
        wrong = value - (matrices * key[..., None]).sum(-2)
        matrices = matrices + key[..., None] * (wrong * tokens.betas[i, :, None])[:, None]
        read[i] = (matrices * query[..., None]).sum(-2)
    return read, matrices
