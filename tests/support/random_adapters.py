"""Adapters of random factors for small decoders, and what they make of weights."""

from collections.abc import Iterable

import numpy as np
from random_decoders import stored

from headrace.engine_proc.worker.adapters.low_rank import LowRank, LowRanks
from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes

OUTSIDE = ("embed", "router", "k_b", "v_b")


def adaptable(spec: DecoderSpec) -> list[str]:
    """Return the weights of a decoder that adapters may change."""
    return [
        name
        for name, shape in weight_shapes(spec).items()
        if len(shape) == 2 and not set(OUTSIDE) & set(name.split("."))
    ] + (["head"] if spec.tied_head else [])


def random_low_rank(
    shape: tuple[int, ...], seed: int, rank: int, gain: bool = False, std: float = 0.2
) -> LowRank:
    """Return factors for a weight that change it about as much as it is large."""
    rng = np.random.default_rng([seed, rank])
    return LowRank(
        a=stored(rng.standard_normal((rank, shape[1]), np.float32) * np.float32(std)),
        b=stored(rng.standard_normal((shape[0], rank), np.float32) * np.float32(std)),
        scale=0.7,
        gain=rng.uniform(0.5, 1.5, shape[0]).astype(np.float32) if gain else None,
    )


def random_adapter(
    spec: DecoderSpec,
    seed: int,
    rank: int,
    names: Iterable[str] | None = None,
    gain: bool = False,
    std: float = 0.2,
) -> LowRanks:
    """Return an adapter of some weights, or of all that may have one."""
    shapes = weight_shapes(spec)
    shapes |= {"head": shapes["embed"]}
    return {
        name: random_low_rank(shapes[name], seed + i, rank, gain, std)
        for i, name in enumerate(adaptable(spec) if names is None else names)
    }


def merged(weights: Weights, adapter: LowRanks) -> Weights:
    """Return weights with an adapter in them, in fp32."""
    result = dict(weights)
    for name, low_rank in adapter.items():
        whole = weights[name].to_float32().astype(np.float64)
        whole = whole + low_rank.delta
        if low_rank.gain is not None:
            whole = whole * low_rank.gain[:, None]
        result[name] = stored(whole.astype(np.float32))
    return result
