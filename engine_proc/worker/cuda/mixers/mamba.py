"""Mamba; see `MambaSpec`."""

from collections.abc import Callable

from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.norm import norm
from headrace.engine_proc.worker.cuda.kernels.numerics import Scaling
from headrace.engine_proc.worker.cuda.matrices.matrices import DeviceWeights
from headrace.engine_proc.worker.cuda.mixers.causal_conv import causal_conv
from headrace.engine_proc.worker.cuda.mixers.gated_norm import GateOrder, gated_norm
from headrace.engine_proc.worker.cuda.mixers.ssm_scan import SsmHeads, scan_channels
from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves
from headrace.engine_proc.worker.models.specs.decoder_spec import MambaSpec


def run_mamba(
    weights: DeviceWeights,
    name: str,
    mamba: MambaSpec,
    eps: float,
    x: Tensor,
    states: Tensor,
    moves: StateMoves,
    sum_shares: Callable[[Tensor], Tensor],
) -> Tensor:
    """Run the Mamba of this name, [tokens, hidden] -> [tokens, hidden].

    Args:
        states: [slots, numbers of the layer]: what is convolved of tokens, and vectors.
        sum_shares: returns the sum of a tensor over all workers: dt, B and C are of all channels.
    """
    tensors, wide, channels = weights.tensors, weights.wide, mamba.channels
    mixed, z = weights.matrices[f"{name}.in"].apply(x).split_with_sizes((channels, channels), 1)
    window = (mamba.kernel_size - 1) * channels
    bias = tensors.get(f"{name}.conv.bias")
    convolved = causal_conv(mixed, tensors[f"{name}.conv"], bias, states[:, :window], moves)
    low = sum_shares(wide[f"{name}.low"].apply_wide(convolved))
    sizes = (mamba.rank, mamba.state_size, mamba.state_size)
    parts = dict(zip(("dt", "b", "c"), low.split_with_sizes(sizes, 1), strict=True))
    for part, numbers in parts.items() if mamba.norms else ():
        weight = tensors[f"{name}.{part}_norm"]
        norm(numbers, weight, scaling=Scaling.RMS, eps=eps, out=numbers)
    dt = wide[f"{name}.dt"].apply_wide(parts["dt"].to(x.dtype))
    of_channels = SsmHeads(*(tensors[f"{name}.{own}"] for own in ("dt_bias", "decay", "skip")))
    bc = low[:, mamba.rank :]
    out = scan_channels(mamba, convolved, bc, dt, of_channels, states[:, window:], moves)
    gated = gated_norm(out, z, None, GateOrder.NO_NORM, group_size=channels)
    return weights.matrices[f"{name}.out"].apply(gated)
