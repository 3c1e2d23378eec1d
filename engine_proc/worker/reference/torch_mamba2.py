"""Mamba-2 in plain torch: one sequence's tokens, one after the other."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.models.specs.decoder_spec import Mamba2Spec

PARTS = ("z", "x", "b", "c", "dt")  # of the projection


def run_mamba2(
    mamba2: Mamba2Spec,
    weights: Mapping[str, Tensor],
    projections: Mapping[str, Tensor],
    state: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Run what is between the projections.

    Args:
        weights: of the layer, under their names within it.
        projections: z, x, b, c and dt, [tokens, numbers] each.
        state: [state_numbers]
    Returns:
        What the last projection reads, [tokens, inner_size], and the state behind the tokens.
    """
    num_heads, count = len(mamba2.heads), len(projections["z"])
    z, x, b, c, dt = (
        projections[name].float() * multiplier
        for name, multiplier in zip(PARTS, mamba2.multipliers, strict=True)
    )
    sizes = (mamba2.inner_size, mamba2.group_numbers, mamba2.group_numbers)
    windows = [(mamba2.kernel_size - 1) * size for size in sizes]
    num_matrices = num_heads * mamba2.head_dim * mamba2.state_size
    *columns, matrices = torch.split_with_sizes(state, [*windows, num_matrices])
    behind = []
    convolved = []
    for name, tokens, window in zip("xbc", (x, b, c), columns, strict=True):
        seen = torch.cat([window.view(-1, tokens.shape[1]), tokens])
        weight = weights[f"conv_{name}"].float().view(-1, 1, mamba2.kernel_size)
        bias = weights.get(f"conv_{name}.bias")
        summed = F.conv1d(
            seen.T[None], weight, None if bias is None else bias.float(), groups=len(weight)
        )
        convolved.append(F.silu(summed[0].T))
        behind.append(seen[-(mamba2.kernel_size - 1) :].flatten())
    x = convolved[0].view(count, num_heads, mamba2.head_dim)
    heads = torch.tensor([h // mamba2.heads_per_group for h in mamba2.heads]) - mamba2.groups.start
    b, c = (part.view(count, -1, mamba2.state_size)[:, heads] for part in convolved[1:])
    dt = F.softplus(dt + weights["dt_bias"].float())
    decays = torch.exp(dt * weights["decay"].float())
    matrix = matrices.view(num_heads, mamba2.state_size, mamba2.head_dim)
    out = torch.empty_like(x)
    for i in range(count):
        moved = torch.einsum("h,hn,hp->hnp", dt[i], b[i], x[i])
        matrix = matrix * decays[i][:, None, None] + moved
        out[i] = torch.einsum("hn,hnp->hp", c[i], matrix)
    out = out + x * weights["skip"].float()[:, None]
    return gated(mamba2, weights, out.flatten(1), z, eps), torch.cat([*behind, matrix.flatten()])


def gated(
    mamba2: Mamba2Spec, weights: Mapping[str, Tensor], x: Tensor, z: Tensor, eps: float
) -> Tensor:
    """Gate the heads' output, and normalize it before or after."""
    if mamba2.norm_before_gate:
        return normalized(mamba2, weights, x, eps) * F.silu(z)
    return normalized(mamba2, weights, x * F.silu(z), eps)


def normalized(mamba2: Mamba2Spec, weights: Mapping[str, Tensor], x: Tensor, eps: float) -> Tensor:
    """Normalize each so many numbers."""
    if not mamba2.norm_size:
        return x
    groups = x.view(len(x), -1, mamba2.norm_size)
    scaled = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return scaled.flatten(1) * weights["ssm_norm"].float()
