"""Mamba in plain torch: one sequence's tokens, one after the other."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.models.specs.decoder_spec import MambaSpec


def run_mamba(
    mamba: MambaSpec,
    weights: Mapping[str, Tensor],
    x: Tensor,
    state: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Run what is behind the projection to x, up to the gate.

    Args:
        weights: of the layer, under their names within it.
        x: [tokens, channels]
        state: [state_numbers]
    Returns:
        What the gate multiplies, [tokens, channels], and the state behind the tokens.
    """
    channels, columns = mamba.channels, mamba.kernel_size - 1
    window, scanned = torch.split_with_sizes(
        state, [columns * channels, mamba.state_size * channels]
    )
    seen = torch.cat([window.view(columns, channels), x.float()])
    bias = weights.get("conv_x.bias")
    kernel = weights["conv_x"].float().view(channels, 1, mamba.kernel_size)
    summed = F.conv1d(seen.T[None], kernel, None if bias is None else bias.float(), groups=channels)
    x = F.silu(summed[0].T)
    dt, b, c = (
        normalized(x @ weights[f"in_{name}"].float().T, weights.get(f"{name}_norm"), eps)
        for name in ("dt", "b", "c")
    )
    dt = F.softplus(dt @ weights["dt"].float().T + weights["dt_bias"].float())
    decay = weights["decay"].float().view(channels, mamba.state_size)
    vectors = scanned.view(mamba.state_size, channels).T
    out = torch.empty_like(x)
    for i in range(len(x)):
        moved = (dt[i] * x[i])[:, None] * b[i]
        vectors = vectors * torch.exp(dt[i][:, None] * decay) + moved
        out[i] = vectors @ c[i]
    out = out + x * weights["skip"].float()
    return out, torch.cat([seen[-columns:].flatten(), vectors.T.flatten()])


def normalized(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalize rows, where there is a norm."""
    return x if weight is None else F.rms_norm(x, x.shape[-1:], weight.float(), eps)
