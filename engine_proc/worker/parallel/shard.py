"""Cuts a decoder into the shards of tensor-parallel workers.

Queries, keys, values, gate and up are cut by rows, `o` and `down` by the columns that read those. A
layer therefore has two sums over the workers. Embedding and head, the largest matrices of a small
model, are cut by tokens. A worker reads and holds only its share, at the price of one more sum per
step. Norms are on every worker.

Experts of a mixture stay whole: each worker has a range of them, routes all tokens, and adds the
experts that it has. A shared MLP is cut as any other; where it has too few blocks, the last workers
have nothing of it.

Channels of a short convolution are cut as heads are: its inputs by rows, `out` by columns. So are
those of Mamba, whose dt, B and C are sums over all workers. So are
key heads of a gated delta net, each with its value heads, and heads of Mamba-2. Where a group's
heads are on several workers, each has the group's B and C. Norms over numbers of several workers
sum their squares.

Heads of latent attention are cut as those of any other. Every worker computes and stores the
latents.

Embeddings per layer are cut by tokens, too. What else Gemma 3n and 4 have around their layers is
on every worker.

Shares need not be equal. Query heads stay with their KV head, which several workers have where
there are fewer of them; quantized blocks stay whole.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.engine_proc.worker.checkpoints.interleaved_rows import InterleavedRows
from headrace.engine_proc.worker.checkpoints.joined_columns import JoinedColumns
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight, Weights
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
    MixtureSpec,
    PerLayerSpec,
    QKNorm,
    ShortConvSpec,
)
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
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
    channels: Mapping[int, range] = field(default_factory=dict)  # of convolutions, by layer
    delta_heads: Mapping[int, range] = field(default_factory=dict)  # of keys, by layer
    mamba2_heads: Mapping[int, range] = field(default_factory=dict)  # of Mamba-2, by layer
    # Of the layers whose numbers are not the decoder's, by layer.
    layer_kv_heads: Mapping[int, range] = field(default_factory=dict)
    layer_inner: Mapping[int, range] = field(default_factory=dict)  # of dense MLPs

    def kv_heads_of(self, layer: int) -> range:
        return self.layer_kv_heads.get(layer, self.kv_heads)

    def inner_of(self, layer: int) -> range:
        return self.layer_inner.get(layer, self.inner)


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
    has_inner = all(all_shards[-1].inner_of(i) for i in dense_layers(spec))
    if not (has_inner and all_shards[-1].tokens):
        unit = inner_unit(spec, weights, num_ranks)
        return (
            f"there is nothing for some in an MLP of {spec.intermediate_size}, in parts of {unit}, "
            f"or in {spec.vocab_size} tokens"
        )
    if any(not channels for channels in all_shards[-1].channels.values()):
        return "there are no channels of the convolutions for some"
    if why := why_no_delta_heads(spec, weights, all_shards):
        return why
    if any(not heads for heads in all_shards[-1].mamba2_heads.values()):
        return "there are no heads of Mamba-2 for some"
    return why_no_heads(spec, weights, all_shards)


def why_no_heads(spec: DecoderSpec, weights: Weights, all_shards: list[Shard]) -> str:
    """Return why heads of attention cannot be cut so; "" where they can."""
    block, num_ranks = max_block(spec, weights, "o"), len(all_shards)
    for i, layer in enumerate(spec.layers):
        num_kv_heads, head_dim = spec.kv_heads_of(layer)[0], output_dim(spec, layer)
        pairs = cut_heads(spec.num_heads, num_kv_heads, num_ranks)
        if [queries for queries, _ in pairs] != [shard.heads for shard in all_shards]:
            return f"layer {i} has {num_kv_heads} KV heads, and others {spec.num_kv_heads}"
        if any(shard.heads.start * head_dim % block for shard in all_shards):
            return (
                f"heads of {head_dim} would be cut from {block} numbers that are quantized as one"
            )
    return ""


def why_no_delta_heads(spec: DecoderSpec, weights: Weights, all_shards: list[Shard]) -> str:
    """Return why the gated delta nets cannot be cut so; "" where they can."""
    for i, delta in delta_nets(spec):
        if not all_shards[-1].delta_heads[i]:
            return f"gated delta nets have {delta.num_key_heads} key heads"
        block = weights[f"layers.{i}.delta.out"].block_numbers
        runs = [run for shard in all_shards for run in value_runs(delta, shard.delta_heads[i])]
        if any(run.start % block for run in runs):
            return (
                f"runs of {len(runs[0])} values of gated delta nets would be cut from {block} "
                "numbers that are quantized as one"
            )
    return ""


def cut_all(spec: DecoderSpec, weights: Weights, num_ranks: int) -> list[Shard]:
    """Return the shares, some of which may be empty."""
    heads = cut_heads(spec.num_heads, spec.num_kv_heads, num_ranks)
    inner = cut(spec.intermediate_size, num_ranks, inner_unit(spec, weights, num_ranks))
    layer_kv_heads = {
        i: [kv for _, kv in cut_heads(spec.num_heads, layer.num_kv_heads, num_ranks)]
        for i, layer in enumerate(spec.layers)
        if layer.num_kv_heads
    }
    layer_inner = {
        i: cut(size, num_ranks, unit_of(size, weights[f"layers.{i}.down"], num_ranks))
        for i, layer in enumerate(spec.layers)
        if layer.has_dense_mlp and (size := layer.intermediate_size)
    }
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
    delta_heads = {i: cut(delta.num_key_heads, num_ranks) for i, delta in delta_nets(spec)}
    mamba2_heads = {
        i: cut(mamba2.num_heads, num_ranks, mamba2_unit(mamba2, weights[f"layers.{i}.out"]))
        for i, mamba2 in mamba2_layers(spec)
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
            delta_heads={i: ranges[rank] for i, ranges in delta_heads.items()},
            mamba2_heads={i: ranges[rank] for i, ranges in mamba2_heads.items()},
            layer_kv_heads={i: ranges[rank] for i, ranges in layer_kv_heads.items()},
            layer_inner={i: ranges[rank] for i, ranges in layer_inner.items()},
        )
        for rank in range(num_ranks)
    ]


def mixtures(spec: DecoderSpec) -> list[tuple[int, MixtureSpec]]:
    """Return the layers that are mixtures."""
    return [(i, layer.mixture) for i, layer in enumerate(spec.layers) if layer.mixture is not None]


def convolutions(spec: DecoderSpec) -> list[tuple[int, ShortConvSpec | MambaSpec]]:
    """Return the layers that are short convolutions, or Mamba."""
    mixers = ((i, layer.mixer) for i, layer in enumerate(spec.layers))
    return [(i, mixer) for i, mixer in mixers if isinstance(mixer, ShortConvSpec | MambaSpec)]


def delta_nets(spec: DecoderSpec) -> list[tuple[int, GatedDeltaNetSpec]]:
    """Return the layers that are gated delta nets."""
    mixers = ((i, layer.mixer) for i, layer in enumerate(spec.layers))
    return [(i, mixer) for i, mixer in mixers if isinstance(mixer, GatedDeltaNetSpec)]


def value_runs(delta: GatedDeltaNetSpec, heads: range) -> list[range]:
    """Return the numbers of the values that read some key heads, by what is adjacent."""
    group = delta.num_value_heads // delta.num_key_heads
    if not delta.is_tiled:
        return [numbers(heads, group * delta.value_dim)]
    firsts = range(0, delta.num_value_heads, delta.num_key_heads)
    return [
        numbers(range(first + heads.start, first + heads.stop), delta.value_dim) for first in firsts
    ]


def mamba2_layers(spec: DecoderSpec) -> list[tuple[int, Mamba2Spec]]:
    """Return the layers that are Mamba-2."""
    mixers = ((i, layer.mixer) for i, layer in enumerate(spec.layers))
    return [(i, mixer) for i, mixer in mixers if isinstance(mixer, Mamba2Spec)]


def mamba2_unit(mamba2: Mamba2Spec, out: Weight) -> int:
    """Return the heads that are cut as one: those of whole quantized blocks."""
    return out.block_numbers // math.gcd(out.block_numbers, mamba2.head_dim)


def cuts_norms(mamba2: Mamba2Spec, shares: Iterable[range]) -> bool:
    """Whether a norm of Mamba-2 is over heads of several workers.

    Args:
        shares: the heads of each worker.
    """
    size = mamba2.norm_size
    return size > 0 and any(heads.start * mamba2.head_dim % size for heads in shares)


def dense_layers(spec: DecoderSpec) -> list[int]:
    """Return the layers that have an MLP of their own."""
    return [i for i, layer in enumerate(spec.layers) if layer.has_dense_mlp]


def inner_unit(spec: DecoderSpec, weights: Weights, num_ranks: int) -> int:
    """Return what the MLP is cut in multiples of, in all dense layers."""
    own = (i for i in dense_layers(spec) if spec.layers[i].intermediate_size is None)
    downs = (weights[f"layers.{i}.down"] for i in own)
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
    for i, delta in delta_nets(spec):
        count, group = len(shard.delta_heads[i]), delta.num_value_heads // delta.num_key_heads
        own_delta = replace(delta, num_key_heads=count, num_value_heads=count * group)
        layers[i] = replace(layers[i], mixer=own_delta)
    for i, mamba2 in mamba2_layers(spec):
        own_heads = replace(mamba2, local_heads=shard.mamba2_heads[i])
        layers[i] = replace(layers[i], mixer=own_heads)
    for i, kv_heads in shard.layer_kv_heads.items():
        layers[i] = replace(layers[i], num_kv_heads=len(kv_heads))
    for i, inner in shard.layer_inner.items():
        layers[i] = replace(layers[i], intermediate_size=len(inner))
    per_layer = spec.per_layer
    if per_layer is not None:
        per_layer = replace(per_layer, vocab_size=len(per_layer_tokens(per_layer, shard)))
    return replace(
        spec,
        per_layer=per_layer,
        layers=tuple(layers),
        num_heads=len(shard.heads),
        num_kv_heads=len(shard.kv_heads),
        intermediate_size=len(shard.inner),
        vocab_size=len(shard.tokens),
    )


def per_layer_tokens(per_layer: PerLayerSpec, shard: Shard) -> range:
    """Return the tokens whose embeddings per layer a worker has: of those that it embeds."""
    count = per_layer.vocab_size
    return range(min(shard.tokens.start, count), min(shard.tokens.stop, count))


def shard_weights(spec: DecoderSpec, weights: Weights, shard: Shard) -> dict[str, Weight]:
    """Return a worker's weights, as views of the whole model's. Nothing is read."""
    names = weight_shapes(shard_spec(spec, shard))
    return {name: share_of(spec, name, weights[name], shard) for name in names}


def share_of(spec: DecoderSpec, name: str, tensor: Weight, shard: Shard) -> Weight:
    """Return a worker's share of a weight, as a view."""
    if not name.startswith("layers."):
        rows = {"embed": shard.tokens, "head": shard.tokens}
        if spec.per_layer is not None:
            rows["per_layer.embed"] = per_layer_tokens(spec.per_layer, shard)
        share = rows.get(name.removesuffix(".bias"))
        return tensor if share is None else tensor.rows(share.start, share.stop)
    _, index, local = name.split(".", 2)
    row_shares, column_shares = shares_of_layer(spec, int(index), shard)
    weight_name = local.removesuffix(".bias")
    if weight_name in CONVOLUTION + MAMBA2:
        return share_of_mixer(spec, name, tensor, shard)
    if local.startswith("delta."):
        return share_of_delta_net(spec, name, tensor, shard)
    if local.startswith("shared."):
        share = shard.shared[int(name.split(".")[1])]
        return share_of_shared(local.removeprefix("shared."), tensor, share, shard.rank)
    if weight_name in row_shares:
        share = row_shares[weight_name]
        return tensor.rows(share.start, share.stop)
    if weight_name in column_shares:
        return column_share(local, tensor, column_shares[weight_name], shard.rank)
    return tensor


def shares_of_layer(
    spec: DecoderSpec, index: int, shard: Shard
) -> tuple[dict[str, range], dict[str, range]]:
    """Return the rows, and the columns, of the weights of a layer that are cut by these."""
    layer = spec.layers[index]
    head_dim, inner = spec.kv_heads_of(layer)[1], shard.inner_of(index)
    queries, keys = numbers(shard.heads, head_dim), numbers(shard.kv_heads_of(index), head_dim)
    rows = {
        "q": queries,
        "k": keys,
        "v": keys,
        "attn_gate": queries,
        "sinks": shard.heads,
        "gate": inner,
        "up": inner,
    }
    if spec.qk_norm == QKNorm.FULL:
        rows |= {"q_norm": queries, "k_norm": keys}
    if (latent := spec.latent) is not None:
        rows |= latent_shares(latent, shard.heads)
    return rows, {"o": numbers(shard.heads, output_dim(spec, layer)), "down": inner}


def output_dim(spec: DecoderSpec, layer: LayerSpec) -> int:
    """Return the numbers of a head that `o` reads."""
    return spec.kv_heads_of(layer)[1] if spec.latent is None else spec.latent.value_dim


def latent_shares(latent: LatentAttentionSpec, heads: range) -> dict[str, range]:
    """Return the rows of the matrices that heads of latent attention have of their own."""
    return {
        "q": numbers(heads, latent.query_dim),
        "q_b": numbers(heads, latent.query_dim),
        "k_b": numbers(heads, latent.rank),
        "v_b": numbers(heads, latent.value_dim),
    }


def column_share(name: str, tensor: Weight, share: range, rank: int) -> Weight:
    """Return the share of a matrix that is cut by columns, or of its bias: a sum has it once."""
    if not name.endswith(".bias"):
        return tensor.columns(share.start, share.stop)
    if rank == 0:
        return tensor
    nothing = np.zeros(tensor.shape, np.float32)
    return StoredTensor(Format.F32, tensor.shape, nothing.view(np.uint8))


CONVOLUTION = ("conv", "in_b", "in_c", "in_x", "out")
MAMBA2 = (
    "in_z", "in_dt", "conv_x", "conv_b", "conv_c", "dt_bias", "decay", "skip", "ssm_norm", "dt",
)  # fmt: skip


def share_of_mixer(spec: DecoderSpec, name: str, tensor: Weight, shard: Shard) -> Weight:
    """Return the share of a weight of a mixer with a state."""
    _, layer, local = name.split(".", 2)
    index = int(layer)
    mixer = spec.layers[index].mixer
    assert isinstance(mixer, ShortConvSpec | MambaSpec | Mamba2Spec)
    if isinstance(mixer, MambaSpec) and local in ("in_dt", "in_b", "in_c"):
        return tensor.columns(shard.channels[index].start, shard.channels[index].stop)
    if isinstance(mixer, ShortConvSpec | MambaSpec):
        outputs = inputs = shard.channels[index]
    else:
        outputs = numbers(shard.mamba2_heads[index], mixer.head_dim)
        inputs = inputs_of_mamba2(mixer, local.removesuffix(".bias"), shard.mamba2_heads[index])
    if local.startswith("out"):
        return column_share(local, tensor, outputs, shard.rank)
    is_convolution = local.startswith("conv") and not local.endswith(".bias")
    unit = mixer.kernel_size if is_convolution else 1
    if isinstance(mixer, MambaSpec) and local == "decay":
        unit = mixer.state_size
    return tensor.rows(inputs.start * unit, inputs.stop * unit)


def inputs_of_mamba2(mamba2: Mamba2Spec, name: str, heads: range) -> range:
    """Return the rows of a weight of Mamba-2 that some heads read."""
    if name in ("in_b", "in_c", "conv_b", "conv_c"):
        return numbers(replace(mamba2, local_heads=heads).groups, mamba2.state_size)
    return (
        heads if name in ("in_dt", "dt_bias", "decay", "skip") else numbers(heads, mamba2.head_dim)
    )


def share_of_delta_net(spec: DecoderSpec, name: str, tensor: Weight, shard: Shard) -> Weight:
    """Return the share of a weight of a gated delta net."""
    _, index, _, local = name.split(".", 3)
    heads, delta = shard.delta_heads[int(index)], dict(delta_nets(spec))[int(index)]
    if local in ("gated_norm", "a_in", "z_in"):
        return tensor
    if local == "out":
        runs = value_runs(delta, heads)
        return JoinedColumns(tuple(tensor.columns(run.start, run.stop) for run in runs))
    unit = tensor.shape[0] // delta.num_key_heads
    if not delta.is_tiled or local[0] in "qk":
        return tensor.rows(heads.start * unit, heads.stop * unit)
    num_rows = unit * len(heads)
    unit = tensor.shape[0] // delta.num_value_heads
    period = unit * delta.num_key_heads
    return InterleavedRows(tensor, heads.start * unit, len(heads) * unit, period, 0, num_rows)


def share_of_shared(name: str, tensor: Weight, share: range, rank: int) -> Weight:
    """Return the share of a weight of a mixture's shared MLP."""
    if name.startswith("down"):
        return column_share(name, tensor, share, rank)
    return tensor if name == "router" else tensor.rows(share.start, share.stop)


def numbers(heads: range, head_dim: int) -> range:
    """Return the numbers of some heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)
