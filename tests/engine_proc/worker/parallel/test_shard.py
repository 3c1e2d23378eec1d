"""What each of several workers has: everything once, but KV heads that are fewer than they."""

import dataclasses

import numpy as np
import pytest

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    LayerSpec,
    Norm,
    QKNorm,
    RopeTable,
)
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.parallel.shard import (
    CannotCut,
    Shard,
    cut,
    cut_heads,
    shard_spec,
    shard_weights,
    shards,
)

SMOL = DecoderSpec(  # SmolLM2-135M, with two layers
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=8192,
    layers=(LayerSpec(),) * 2,
    ropes=(RopeTable(inv_freq=(1.0,) * 32),),
)
BIASED = dataclasses.replace(
    SMOL,
    vocab_size=110,
    hidden_size=64,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    tied_head=False,
    attention_sinks=True,
    qk_norm=QKNorm.FULL,
)
BLOCK_BYTES = {Format.Q8_0: (32, 34), Format.Q4_K: (256, 144)}


def untouched(spec: DecoderSpec, format: Format = Format.F32) -> dict[str, StoredTensor]:
    """Weights of zeros; matrices of `format`."""
    weights = {}
    for name, shape in weight_shapes(spec).items():
        numbers, nbytes = BLOCK_BYTES.get(format, (1, 4)) if len(shape) == 2 else (1, 4)
        kind = format if len(shape) == 2 else Format.F32
        data = np.zeros(int(np.prod(shape)) // numbers * nbytes, np.uint8)
        weights[name] = StoredTensor(kind, shape, data)
    return weights


def numbered(spec: DecoderSpec) -> dict[str, StoredTensor]:
    """Weights in which every number is its own place."""
    weights = {}
    for name, shape in weight_shapes(spec).items():
        numbers = np.arange(np.prod(shape), dtype=np.float32)
        weights[name] = StoredTensor(Format.F32, shape, numbers.view(np.uint8))
    return weights


def shares(spec: DecoderSpec, num_ranks: int) -> list[Shard]:
    return shards(spec, untouched(spec), num_ranks)


@pytest.mark.parametrize(
    ("count", "parts", "unit", "sizes"),
    [
        (9, 2, 1, [5, 4]),
        (1536, 2, 32, [768, 768]),
        (160, 3, 32, [64, 64, 32]),
        (77, 2, 32, [64, 13]),  # the last unit is short
        (64, 3, 32, [32, 32, 0]),
    ],
)
def test_shares_are_whole_units_and_as_even_as_that_goes(
    count: int, parts: int, unit: int, sizes: list[int]
) -> None:
    ranges = cut(count, parts, unit)
    assert [len(r) for r in ranges] == sizes
    assert [i for r in ranges for i in r] == list(range(count))


@pytest.mark.parametrize("num_ranks", range(1, 17))
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 8), (6, 6), (14, 2), (8, 1)])
def test_each_query_head_has_a_rank_with_its_kv_head(
    num_heads: int, num_kv_heads: int, num_ranks: int
) -> None:
    if num_ranks > num_heads:
        return
    found = cut_heads(num_heads, num_kv_heads, num_ranks)
    assert len(found) == num_ranks
    assert [head for heads, _ in found for head in heads] == list(range(num_heads))
    group = num_heads // num_kv_heads
    for heads, kv_heads in found:
        assert {head // group for head in heads} == set(kv_heads)
        assert len(heads) % len(kv_heads) == 0
        assert len(heads) == len(kv_heads) * group or len(kv_heads) == 1


def test_uneven_heads_are_shared_by_kv_head() -> None:
    found = shares(SMOL, 2)
    assert [(len(s.heads), len(s.kv_heads), len(s.inner)) for s in found] == [
        (6, 2, 768),
        (3, 1, 768),
    ]
    found = shares(SMOL, 4)  # more than KV heads
    assert [(list(s.heads), list(s.kv_heads), s.owns_keys) for s in found] == [
        ([0, 1], [0], True),
        ([2], [0], False),
        ([3, 4, 5], [1], True),
        ([6, 7, 8], [2], True),
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_cut_part_belongs_to_one_rank(num_ranks: int) -> None:
    weights = numbered(BIASED)
    found = [shard_weights(BIASED, weights, shard) for shard in shares(BIASED, num_ranks)]
    for name, whole in weights.items():
        numbers = whole.to_float32()
        parts = [own[name].to_float32() for own in found]
        match name.split(".", 2)[-1]:
            case "attn_norm" | "mlp_norm" | "norm":
                assert all(np.array_equal(part, numbers) for part in parts), name
            case "o.bias" | "down.bias":
                assert np.array_equal(np.sum(parts, axis=0), numbers), name
            case "k" | "v" | "k.bias" | "v.bias" | "k_norm":
                assert np.array_equal(np.unique(np.concatenate(parts)), np.unique(numbers)), name
            case "o" | "down":
                assert np.array_equal(np.concatenate(parts, axis=1), numbers), name
            case _:
                assert np.array_equal(np.concatenate(parts), numbers), name


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_share_is_a_decoder_of_its_own(num_ranks: int) -> None:
    for shard in shares(BIASED, num_ranks):
        own = shard_weights(BIASED, numbered(BIASED), shard)
        shapes = {name: tensor.shape for name, tensor in own.items()}
        assert shapes == weight_shapes(shard_spec(BIASED, shard))


def test_quantized_blocks_stay_whole() -> None:
    spec = dataclasses.replace(SMOL, hidden_size=768, num_heads=12, num_kv_heads=12)
    found = shards(spec, untouched(spec, Format.Q4_K), 3)  # of 256 numbers, four heads
    assert [len(s.inner) for s in found] == [512, 512, 512]
    for shard in found:
        for name, tensor in shard_weights(spec, untouched(spec, Format.Q4_K), shard).items():
            if len(tensor.shape) == 2:
                blocks = tensor.shape[0] * tensor.shape[1] // 256
                assert tensor.data.size == 144 * blocks, name


@pytest.mark.parametrize(
    ("spec", "format", "num_ranks", "text"),
    [
        (SMOL, Format.F32, 10, "--tp 10: the model has 9 heads; it can be 1, 2, 3, 4, 5, 6, 7,"),
        (
            dataclasses.replace(SMOL, hidden_size=768, num_heads=12, num_kv_heads=12),
            Format.Q4_K,
            2,
            "heads of 64 would be cut from 256 numbers that are quantized as one; it can be 1, 3$",
        ),
        (
            dataclasses.replace(SMOL, hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=256),
            Format.Q4_K,
            8,
            "an MLP of 1536, in parts of 256, or in 49152 tokens; it can be 1, 2, 3, 4, 5, 6$",
        ),
        (
            dataclasses.replace(SMOL, norm=Norm.LAYER, qk_norm=QKNorm.FULL),
            Format.F32,
            2,
            "a LayerNorm over all heads has a mean, which is not summed over workers",
        ),
    ],
)
def test_unservable_tp_size_names_the_sizes_that_fit(
    spec: DecoderSpec, format: Format, num_ranks: int, text: str
) -> None:
    with pytest.raises(CannotCut, match=text):
        shards(spec, untouched(spec, format), num_ranks)
