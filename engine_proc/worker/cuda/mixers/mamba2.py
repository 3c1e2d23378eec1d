"""Mamba-2; see `Mamba2Spec`."""

from torch import Tensor

from headrace.engine_proc.worker.cuda.matrices.matrices import DeviceWeights
from headrace.engine_proc.worker.cuda.mixers.causal_conv import causal_conv
from headrace.engine_proc.worker.cuda.mixers.gated_norm import CutNorms, GateOrder, gated_norm
from headrace.engine_proc.worker.cuda.mixers.ssd import scan_ssm
from headrace.engine_proc.worker.cuda.mixers.ssm_scan import SsmHeads
from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves
from headrace.engine_proc.worker.models.specs.decoder_spec import Mamba2Spec


def run_mamba2(
    weights: DeviceWeights,
    name: str,
    mamba2: Mamba2Spec,
    eps: float,
    x: Tensor,
    states: Tensor,
    moves: StateMoves,
    cut: CutNorms | None,
) -> Tensor:
    """Run the Mamba-2 of this name, [tokens, hidden] -> [tokens, hidden].

    Args:
        states: [slots, numbers of the layer]: what is convolved of tokens, and matrices.
        cut: norms over heads of several workers; None is whole norms.
    """
    tensors, width = weights.tensors, mamba2.inner_size + 2 * mamba2.group_numbers
    parts = mamba2.inner_size, width, len(mamba2.heads)
    z, xbc, dt = weights.matrices[f"{name}.in"].apply(x).split_with_sizes(parts, 1)
    window = (mamba2.kernel_size - 1) * width
    bias = tensors.get(f"{name}.conv.bias")
    convolved = causal_conv(xbc, tensors[f"{name}.conv"], bias, states[:, :window], moves)
    heads = SsmHeads(*(tensors[f"{name}.{part}"] for part in ("dt_bias", "decay", "skip")))
    out = scan_ssm(mamba2, convolved, dt, heads, states[:, window:], moves)
    mixed = gated_norm(
        out.flatten(1),
        z,
        tensors.get(f"{name}.ssm_norm"),
        order_of(mamba2),
        group_size=mamba2.norm_size or mamba2.head_dim,
        eps=eps,
        multiplier=mamba2.multipliers[0],
        cut=cut,
    )
    return weights.matrices[f"{name}.out"].apply(mixed)


def order_of(mamba2: Mamba2Spec) -> GateOrder:
    """Return where the norm is."""
    if not mamba2.norm_size:
        return GateOrder.NO_NORM
    return GateOrder.NORM_FIRST if mamba2.norm_before_gate else GateOrder.GATE_FIRST
