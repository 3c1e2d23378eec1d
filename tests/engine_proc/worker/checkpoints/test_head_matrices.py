"""Matrices of heads are the parts of a tensor that they should be, in any format."""

import numpy as np
import pytest
from random_decoders import random_blocks, stored

from headrace.engine_proc.worker.checkpoints.head_matrices import (
    KEYS,
    VALUES,
    HeadMatrices,
    bf16_bits,
    with_heads,
)
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor
from headrace.errors import ModelError

HEADS, NOPE, VALUE, RANK = 3, 24, 16, 64
NAME = "model.layers.0.self_attn.kv_b_proj.weight"
SHAPE = (HEADS * (NOPE + VALUE), RANK)


def tensor_of(format: Format) -> StoredTensor:
    if format == Format.Q8_0:
        return random_blocks(SHAPE, format)
    return stored(np.random.default_rng(0).standard_normal(SHAPE, np.float32), format)


@pytest.mark.parametrize("format", [Format.F32, Format.BF16, Format.Q8_0])
def test_keys_are_transposed_and_values_are_not(format: Format) -> None:
    tensor = tensor_of(format)
    found = with_heads({NAME: tensor, "other": tensor}, HEADS, NOPE, VALUE)
    assert found.keys() == {NAME + KEYS, NAME + VALUES, "other"}
    heads = tensor.to_float32().reshape(HEADS, NOPE + VALUE, RANK)
    keys, values = found[NAME + KEYS], found[NAME + VALUES]
    assert keys.shape == (HEADS * RANK, NOPE)
    expected = heads[:, :NOPE].transpose(0, 2, 1).reshape(-1, NOPE)
    is_quantized = format == Format.Q8_0
    assert keys.format == (Format.BF16 if is_quantized else format)
    np.testing.assert_allclose(keys.to_float32(), expected, rtol=2**-8 if is_quantized else 0)
    assert values.format == format
    np.testing.assert_array_equal(values.to_float32(), heads[:, NOPE:].reshape(HEADS * VALUE, RANK))


@pytest.mark.parametrize("which", [KEYS, VALUES])
def test_rows_and_columns_of_heads_are_parts_of_the_whole(which: str) -> None:
    weight = with_heads({NAME: tensor_of(Format.BF16)}, HEADS, NOPE, VALUE)[NAME + which]
    whole = weight.to_float32()
    for start, stop in ((0, 16), (8, 40), (16, len(whole)), (len(whole) - 1, len(whole))):
        part = weight.rows(start, stop)
        assert part.shape == (stop - start, whole.shape[1])
        np.testing.assert_array_equal(part.stored().to_float32(), whole[start:stop])
    np.testing.assert_array_equal(weight.columns(8, 16).to_float32(), whole[:, 8:16])


def test_numbers_are_rounded_to_the_nearest_bf16() -> None:
    """To the even one of two that are as near."""
    numbers = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1.01, -1.01], np.float32)
    nearest = np.array([1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1 - 2**-7], np.float32)
    np.testing.assert_array_equal(bf16_bits(numbers), nearest.view(np.uint32) >> 16)


def test_stacks_of_heads_are_put_together() -> None:
    stack = {f"blk.0.attn_k_b.weight[{i}]": stored(np.full((4, 2), i, np.float32)) for i in (0, 1)}
    found = with_heads(stack, 2, 2, 2)
    assert found.keys() == {"blk.0.attn_k_b.weight"}
    whole = found["blk.0.attn_k_b.weight"]
    assert isinstance(whole, HeadMatrices)
    np.testing.assert_array_equal(whole.to_float32()[:, 0], [0] * 4 + [1] * 4)


def test_a_tensor_of_other_heads_is_refused() -> None:
    with pytest.raises(ModelError, match=r"shape \[120, 64\], but 4 heads of 24 and 16 have 160"):
        with_heads({NAME: tensor_of(Format.F32)}, 4, NOPE, VALUE)
