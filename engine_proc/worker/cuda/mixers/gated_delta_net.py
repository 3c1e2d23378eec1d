"""The gated delta net of Qwen3-Next, and Kimi's; see `GatedDeltaNetSpec`."""

from torch import Tensor

from headrace.engine_proc.worker.cuda.matrices.matrices import DeviceWeights
from headrace.engine_proc.worker.cuda.mixers.causal_conv import causal_conv
from headrace.engine_proc.worker.cuda.mixers.delta_rule import DeltaGates, apply_delta_rule
from headrace.engine_proc.worker.cuda.mixers.gated_delta_rule import apply_gated_delta_rule
from headrace.engine_proc.worker.cuda.mixers.gated_norm import GateOrder, gated_norm
from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves
from headrace.engine_proc.worker.models.specs.decoder_spec import GatedDeltaNetSpec


def run_gated_delta_net(
    weights: DeviceWeights,
    name: str,
    delta: GatedDeltaNetSpec,
    eps: float,
    x: Tensor,
    states: Tensor,
    moves: StateMoves,
) -> Tensor:
    """Run the gated delta net of this name, [tokens, hidden] -> [tokens, hidden].

    Args:
        states: [slots, numbers of the layer]: what is convolved of tokens, and matrices.
    """
    own, tensors = f"{name}.delta", weights.tensors
    qkv, z, gates = project(weights, own, delta, x)
    window = (delta.kernel_size - 1) * qkv.shape[1]
    convolved = causal_conv(qkv, tensors[f"{own}.conv"], None, states[:, :window], moves)
    apply = apply_delta_rule if delta.gate_rank else apply_gated_delta_rule
    read = apply(delta, convolved, gates, states[:, window:], moves)
    mixed = gated_norm(
        read.flatten(1),
        z,
        tensors[f"{own}.gated_norm"],
        GateOrder.NORM_FIRST,
        group_size=delta.value_dim,
        eps=eps,
        is_sigmoid=delta.gate_rank > 0,
    )
    return weights.matrices[f"{own}.out"].apply(mixed)


def project(
    weights: DeviceWeights, own: str, delta: GatedDeltaNetSpec, x: Tensor
) -> tuple[Tensor, Tensor, DeltaGates]:
    """Return queries, keys and values side by side, z, and the gates."""
    matrices, wide = weights.matrices, weights.wide
    learned = weights.tensors[f"{own}.a.bias"], weights.tensors[f"{own}.rate"]
    if delta.gate_rank:
        qkv = matrices[f"{own}.qkv"].apply(x)
        z, low_a = (matrices[f"{own}.{low}_in"].apply(x) for low in "za")
        z, betas = matrices[f"{own}.z"].apply(z), wide[f"{own}.b"].apply_wide(x)
        return qkv, z, DeltaGates(betas, wide[f"{own}.a"].apply_wide(low_a), *learned)
    qkvz = matrices[f"{own}.qkvz"].apply(x)
    qkv, z = qkvz.split_with_sizes((qkvz.shape[1] - delta.value_width, delta.value_width), 1)
    betas, steps = wide[f"{own}.ba"].apply_wide(x).chunk(2, 1)
    return qkv, z, DeltaGates(betas, steps, *learned)
