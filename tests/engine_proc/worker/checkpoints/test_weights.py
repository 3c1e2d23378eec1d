"""Every stored format decodes to the very numbers that other readers get."""

import gguf
import numpy as np
import pytest
import torch

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor

OTHERS = (Format.F8_E4M3, Format.I32, Format.I64, Format.U8)
GGUF_FORMATS = [format for format in Format if format not in OTHERS]


def random_tensor(format: Format, num_rows: int, num_blocks: int) -> StoredTensor:
    """Return random bytes as a tensor. Scales are random too: huge, tiny, infinite, NaN."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]]
    data = np.random.default_rng(0).integers(0, 256, num_rows * num_blocks * nbytes, np.uint8)
    return StoredTensor(format, (num_rows, num_blocks * numbers), data)


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_decoding_is_bitwise_that_of_the_gguf_package(format: Format) -> None:
    stored = random_tensor(format, num_rows=40, num_blocks=70)  # more than one chunk
    with np.errstate(all="ignore"):
        decoded = stored.to_float32()
        expected = gguf.dequantize(
            stored.data.reshape(40, -1), gguf.GGMLQuantizationType[format]
        ).reshape(stored.shape)
    np.testing.assert_array_equal(decoded, expected)
    assert decoded.dtype == np.float32


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_rows_of_a_tensor_are_rows_of_its_numbers(format: Format) -> None:
    stored = random_tensor(format, num_rows=8, num_blocks=2)
    part = stored.rows(3, 7)
    assert np.shares_memory(part.data, stored.data)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(part.to_float32(), stored.to_float32()[3:7])


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_columns_of_a_tensor_are_columns_of_its_numbers(format: Format) -> None:
    stored = random_tensor(format, num_rows=8, num_blocks=5)
    block = stored.block_numbers
    part = stored.columns(block, 3 * block)
    assert np.shares_memory(part.data, stored.data)
    with np.errstate(all="ignore"):
        numbers = stored.to_float32()[:, block : 3 * block]
        np.testing.assert_array_equal(part.to_float32(), numbers)
        np.testing.assert_array_equal(part.rows(2, 5).to_float32(), numbers[2:5])


def test_8_bit_floats_are_those_of_torch() -> None:
    data = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(data).view(torch.float8_e4m3fn).float().numpy()
    decoded = StoredTensor(Format.F8_E4M3, (2, 128), data).to_float32()
    np.testing.assert_array_equal(decoded.reshape(-1), expected)


def test_decoded_numbers_are_the_callers_own() -> None:
    stored = random_tensor(Format.F32, num_rows=2, num_blocks=4)
    assert not np.shares_memory(stored.to_float32(), stored.data)


def test_rounding_to_q4_0_takes_the_nearest_of_16_steps() -> None:
    rng = np.random.default_rng(1)
    numbers = rng.standard_normal((3, 64), np.float32)
    numbers[1, :32] = 0
    stored = StoredTensor(Format.F32, numbers.shape, numbers.reshape(-1).view(np.uint8))
    rounded = stored.to_q4_0()
    assert rounded.format == Format.Q4_0
    largest = np.abs(numbers).reshape(-1, 32).max(axis=1, keepdims=True)
    errors = np.abs(rounded.to_float32() - numbers).reshape(-1, 32)
    assert (errors <= largest / 8 * 1.01).all()
    assert np.median(errors / np.maximum(largest, 1e-9)) < 1 / 16


def test_rounding_to_q8_0_takes_the_nearest_of_255_steps() -> None:
    numbers = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    numbers[1, :32] = 0
    stored = StoredTensor(Format.F32, numbers.shape, numbers.reshape(-1).view(np.uint8))
    rounded = stored.to_q8_0()
    assert rounded.format == Format.Q8_0 and rounded.shape == numbers.shape
    blocks = rounded.data.reshape(-1, 34)
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    assert np.abs(blocks[:, 2:].view(np.int8)).max(axis=1).tolist() == [127, 127, 0] + [127] * 5
    errors = np.abs(rounded.to_float32() - numbers).reshape(-1, 32)
    assert (errors <= 0.501 * scales).all()
