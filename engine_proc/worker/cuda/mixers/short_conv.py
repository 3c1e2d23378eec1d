"""LFM2's gated short convolution; see `ShortConvSpec`."""

from torch import Tensor

from headrace.engine_proc.worker.cuda.matrices.matrices import DeviceWeights
from headrace.engine_proc.worker.cuda.mixers.causal_conv import causal_conv
from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves


def run_short_conv(
    weights: DeviceWeights, name: str, x: Tensor, states: Tensor, moves: StateMoves
) -> Tensor:
    """Run the short convolution of this name, [tokens, hidden] -> [tokens, hidden].

    Args:
        states: [slots, numbers of the layer].
    """
    mixed = causal_conv(
        weights.matrices[f"{name}.in"].apply(x),
        weights.tensors[f"{name}.conv"],
        weights.tensors.get(f"{name}.conv.bias"),
        states,
        moves,
        is_gated=True,
    )
    return weights.matrices[f"{name}.out"].apply(mixed)
