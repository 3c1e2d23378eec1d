"""GELU and LayerNorm of rows are torch's, and the same beside any other row."""

import numpy as np
import pytest
import torch

from headrace.engine_proc.worker.models.dense_layers import gelu, layer_norm


@pytest.mark.parametrize("shape", [(1, 4001), (3, 16), (5,), (0,)])
def test_gelu_is_that_of_torch(shape: tuple[int, ...]) -> None:
    x = np.linspace(-12, 12, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    expected = torch.nn.functional.gelu(torch.from_numpy(x)).numpy()
    found = gelu(x)
    assert found.shape == shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("width", [1, 16, 37, 1000])
def test_layer_norm_is_that_of_torch(width: int) -> None:
    random = np.random.default_rng(0)
    x = (3 * random.normal(size=(3, width)) + 2).astype(np.float32)
    weight, bias = random.normal(size=(2, width)).astype(np.float32)
    for shift in (bias, None):
        tensors = [None if own is None else torch.from_numpy(own) for own in (weight, shift)]
        expected = torch.nn.functional.layer_norm(torch.from_numpy(x), (width,), *tensors, 1e-4)
        found = layer_norm(x, weight, shift, 1e-4)
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=2e-5)
        for row, alone in zip(found, x, strict=True):
            np.testing.assert_array_equal(layer_norm(alone, weight, shift, 1e-4), row)
