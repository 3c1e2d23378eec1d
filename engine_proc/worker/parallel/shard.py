"""Cuts a decoder into the shards of tensor-parallel workers.

Queries, keys, values, gate and up are cut by rows, `o` and `down` by the columns that read those. A
layer therefore has two sums over the workers. Embedding and head, the largest matrices of a small
model, are cut by tokens. A worker reads and holds only its share, at the price of one more sum per
step. Norms are on every worker.

Experts of a mixture stay whole: each worker has a range of them, routes all tokens, and adds the
experts that it has. A shared MLP is cut as any other; where it has too few blocks, the last workers
have nothing of it.

Channels of a short convolution are cut as heads are: its inputs by rows, `out` by columns.

Shares need not be equal. Query heads stay with their KV head, which several workers have where
there are fewer of them; quantized blocks stay whole.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight, Weights
from headrace.engine_proc.worker.models.decoder_spec import (
    DecoderSpec,
    MixtureSpec,
    QKNorm,
    ShortConvSpec,
)
from headrace.engine_proc.worker.models.weight_names import weight_shapes
from headrace.errors import ModelError

MAX_RANKS = 16
INNER_UNIT = 32  # numbers of the MLP: whole groups of `int8`, whole blocks of packed rows


class CannotCut(ModelError):
    """A model cannot be split over so many workers; the text lists the possible numbers."""


@dataclass(frozen=True)
class Shard:
    """A worker's share. Ranges count in the whole model."""

    rank: int
    heads: range  # of queries
    kv_heads: range
    inner: range  # numbers of the MLP
    tokens: range  # of the vocabulary
    owns_keys: bool = True  # no worker before it has its KV heads
    # Of the layers that are mixtures, by layer: experts, and numbers of the shared MLP.
    experts: Mapping[int, range] = field(default_factory=dict)
    shared: Mapping[int, range] = field(default_factory=dict)
    channels: Mapping[int, range] = field(default_factory=dict)  # of short convolutions, by layer


def cut(count: int, parts: int, unit: int = 1) -> list[range]:
    """Cut `count` into ranges of whole units, as even as that goes; the first are the longest."""
    quotient, remainder = divmod(-(-count // unit), parts)
    ends = [(quotient * i + min(i, remainder)) * unit for i in range(parts + 1)]
    return [range(a, min(b, count)) for a, b in itertools.pairwise(ends)]


def cut_heads(num_heads: int, num_kv_heads: int, parts: int) -> list[tuple[range, range]]:
    """Return the query heads and the KV heads of each worker.

    With fewer KV heads than workers each worker has one of them, and some of its queries.
    """
    group = num_heads // num_kv_heads
    if parts <= num_kv_heads:
        return [(range(kv.start * group, kv.stop * group), kv) for kv in cut(num_kv_heads, parts)]
    return [
        (range(kv * group + own.start, kv * group + own.stop), range(kv, kv + 1))
        for kv, sharers in enumerate(cut(parts, num_kv_heads))
        for own in cut(group, len(sharers))
    ]


def shards(spec: DecoderSpec, weights: Weights, num_ranks: int) -> list[Shard]:
    """Return the share of each worker, by rank.

    Raises:
        CannotCut: there is none for so many.
    """
    why = why_not(spec, weights, num_ranks)
    if why:
        fits = [str(n) for n in range(1, MAX_RANKS + 1) if not why_not(spec, weights, n)]
        raise CannotCut(f"--tp {num_ranks}: {why}; it can be {', '.join(fits)}")
    return cut_all(spec, weights, num_ranks)


def why_not(spec: DecoderSpec, weights: Weights, num_ranks: int) -> str:
    """Return why there are no shares for so many workers; "" where there are."""
    if num_ranks == 1:
        return ""
    if num_ranks > spec.num_heads:
        return f"the model has {spec.num_heads} heads"
    if spec.qk_norm == QKNorm.FULL and spec.norm.subtracts_mean:
        return "a LayerNorm over all heads has a mean, which is not summed over workers"
    all_shards = cut_all(spec, weights, num_ranks)
    fewest = min((mixture.num_experts for _, mixture in mixtures(spec)), default=num_ranks)
    if num_ranks > fewest:
        return f"the model has {fewest} experts"
    has_inner = all_shards[-1].inner or not dense_layers(spec)
    if not (has_inner and all_shards[-1].tokens):
        unit = inner_unit(spec, weights, num_ranks)
        return (
            f"there is nothing for some in an MLP of {spec.intermediate_size}, in parts of {unit}, "
            f"or in {spec.vocab_size} tokens"
        )
    if any(not channels for channels in all_shards[-1].channels.values()):
        return "there are no channels of the short convolutions for some"
    block = max_block(spec, weights, "o")
    if any(shard.heads.start * spec.head_dim % block for shard in all_shards):
        return (
            f"heads of {spec.head_dim} would be cut from {block} numbers that are quantized as one"
        )
    return ""


def cut_all(spec: DecoderSpec, weights: Weights, num_ranks: int) -> list[Shard]:
    """Return the shares, some of which may be empty."""
    heads = cut_heads(spec.num_heads, spec.num_kv_heads, num_ranks)
    inner = cut(spec.intermediate_size, num_ranks, inner_unit(spec, weights, num_ranks))
    tokens = cut(spec.vocab_size, num_ranks)
    first_of = {kv.start: rank for rank, (_, kv) in reversed(list(enumerate(heads)))}
    experts = {i: cut(mixture.num_experts, num_ranks) for i, mixture in mixtures(spec)}
    shared = {
        i: cut(size, num_ranks, unit_of(size, weights[f"layers.{i}.shared.down"], num_ranks))
        for i, mixture in mixtures(spec)
        if (size := mixture.shared_intermediate_size)
    }
    channels = {
        i: cut(n, num_ranks, unit_of(n, weights[f"layers.{i}.out"], num_ranks))
        for i, n in ((i, conv.channels) for i, conv in convolutions(spec))
    }
    return [
        Shard(
            rank,
            *heads[rank],
            inner[rank],
            tokens[rank],
            owns_keys=first_of[heads[rank][1].start] == rank,
            experts={i: ranges[rank] for i, ranges in experts.items()},
            shared={i: ranges[rank] for i, ranges in shared.items()},
            channels={i: ranges[rank] for i, ranges in channels.items()},
        )
        for rank in range(num_ranks)
    ]


def mixtures(spec: DecoderSpec) -> list[tuple[int, MixtureSpec]]:
    """Return the layers that are mixtures."""
    return [(i, layer.mixture) for i, layer in enumerate(spec.layers) if layer.mixture is not None]


def convolutions(spec: DecoderSpec) -> list[tuple[int, ShortConvSpec]]:
    """Return the layers that are short convolutions."""
    return [(i, layer.mixer) for i, layer in enumerate(spec.layers) if layer.mixer is not None]


def dense_layers(spec: DecoderSpec) -> list[int]:
    """Return the layers that have an MLP of their own."""
    return [i for i, layer in enumerate(spec.layers) if layer.mixture is None]


def inner_unit(spec: DecoderSpec, weights: Weights, num_ranks: int) -> int:
    """Return what the MLP is cut in multiples of, in all dense layers."""
    downs = (weights[f"layers.{i}.down"] for i in dense_layers(spec))
    return max((unit_of(spec.intermediate_size, down, num_ranks) for down in downs), default=1)


def unit_of(size: int, down: Weight, num_ranks: int) -> int:
    """Return what an MLP is cut in multiples of: 1 only in models too small for more."""
    is_tiny = size < INNER_UNIT * num_ranks
    return down.block_numbers if down.block_numbers > 1 or is_tiny else INNER_UNIT


def max_block(spec: DecoderSpec, weights: Weights, name: str) -> int:
    """Return how many numbers of a row are quantized as one in a matrix, in any layer with it."""
    names = (f"layers.{i}.{name}" for i in range(len(spec.layers)))
    return max((weights[name].block_numbers for name in names if name in weights), default=1)


def shard_spec(spec: DecoderSpec, shard: Shard) -> DecoderSpec:
    """Return a worker's share as a decoder of its own."""
    layers = list(spec.layers)
    for i, mixture in mixtures(spec):
        shared_size = len(shard.shared.get(i, ()))
        own = replace(
            mixture,
            local_experts=shard.experts[i],
            shared_intermediate_size=shared_size,
            shared_gate=mixture.shared_gate and shared_size > 0,
        )
        layers[i] = replace(layers[i], mixture=own)
    for i, conv in convolutions(spec):
        layers[i] = replace(layers[i], mixer=replace(conv, channels=len(shard.channels[i])))
    return replace(
        spec,
        layers=tuple(layers),
        num_heads=len(shard.heads),
        num_kv_heads=len(shard.kv_heads),
        intermediate_size=len(shard.inner),
        vocab_size=len(shard.tokens),
    )


def shard_weights(spec: DecoderSpec, weights: Weights, shard: Shard) -> dict[str, Weight]:
    """Return a worker's weights, as views of the whole model's. Nothing is read."""
    queries, keys = numbers(shard.heads, spec.head_dim), numbers(shard.kv_heads, spec.head_dim)
    row_shares = {
        "embed": shard.tokens,
        "head": shard.tokens,
        "q": queries,
        "k": keys,
        "v": keys,
        "sinks": shard.heads,
        "gate": shard.inner,
        "up": shard.inner,
    }
    if spec.qk_norm == QKNorm.FULL:
        row_shares |= {"q_norm": queries, "k_norm": keys}
    column_shares = {"o": queries, "down": shard.inner}
    shares: dict[str, Weight] = {}
    for name in weight_shapes(shard_spec(spec, shard)):
        tensor = weights[name]
        local = name.split(".", 2)[2] if name.startswith("layers.") else name
        weight_name = local.removesuffix(".bias")
        if weight_name in CONVOLUTION:
            tensor = share_of_convolution(spec, name, tensor, shard)
        elif local.startswith("shared."):
            share = shard.shared[int(name.split(".")[1])]
            tensor = share_of_shared(local.removeprefix("shared."), tensor, share, shard.rank)
        elif weight_name in row_shares:
            share = row_shares[weight_name]
            tensor = tensor.rows(share.start, share.stop)
        elif weight_name in column_shares:
            tensor = column_share(local, tensor, column_shares[weight_name], shard.rank)
        shares[name] = tensor
    return shares


def column_share(name: str, tensor: Weight, share: range, rank: int) -> Weight:
    """Return the share of a matrix that is cut by columns, or of its bias: a sum has it once."""
    if not name.endswith(".bias"):
        return tensor.columns(share.start, share.stop)
    if rank == 0:
        return tensor
    nothing = np.zeros(tensor.shape, np.float32)
    return StoredTensor(Format.F32, tensor.shape, nothing.view(np.uint8))


CONVOLUTION = ("conv", "in_b", "in_c", "in_x", "out")


def share_of_convolution(spec: DecoderSpec, name: str, tensor: Weight, shard: Shard) -> Weight:
    """Return the share of a weight of a short convolution."""
    _, index, local = name.split(".", 2)
    channels, conv = shard.channels[int(index)], spec.layers[int(index)].mixer
    if local.startswith("out"):
        return column_share(local, tensor, channels, shard.rank)
    assert conv is not None
    unit = conv.kernel_size if local == "conv" else 1
    return tensor.rows(channels.start * unit, channels.stop * unit)


def share_of_shared(name: str, tensor: Weight, share: range, rank: int) -> Weight:
    """Return the share of a weight of a mixture's shared MLP."""
    if name.startswith("down"):
        return column_share(name, tensor, share, rank)
    return tensor if name == "router" else tensor.rows(share.start, share.stop)


def numbers(heads: range, head_dim: int) -> range:
    """Return the numbers of some heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)
