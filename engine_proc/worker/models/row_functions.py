"""GELU and LayerNorm of rows, by the kernels of the C++ core's layers."""

from ctypes import c_float, c_int32, c_void_p

import numpy as np
import numpy.typing as npt

from headrace.native_core import load_core

Floats = npt.NDArray[np.float32]
LANES = 16  # numbers that kernels take together


def gelu(x: Floats) -> Floats:
    """Return x * P(X <= x) of the normal distribution, off by 1.5e-7 |x| at most."""
    compute = load_core().headrace_cpu_gelu
    compute.restype, compute.argtypes = None, (c_void_p, c_int32)
    found = np.zeros(-(-x.size // LANES) * LANES, np.float32)
    found[: x.size] = x.ravel()
    compute(found.ctypes.data, found.size)
    return found[: x.size].reshape(x.shape)


def layer_norm(x: Floats, weight: Floats, bias: Floats | None = None, eps: float = 1e-5) -> Floats:
    """Return rows with a mean of 0 and a variance of 1, times a weight, with a bias."""
    compute = load_core().headrace_cpu_layer_norm
    sizes = (c_int32, c_int32, c_float)
    compute.restype, compute.argtypes = None, (c_void_p, c_void_p, c_void_p, *sizes, c_void_p)
    rows, scale = (np.ascontiguousarray(array, np.float32) for array in (x, weight))
    shift = np.zeros_like(scale) if bias is None else np.ascontiguousarray(bias, np.float32)
    found = np.empty_like(rows)
    num_rows, num_cols = rows.size // scale.size, scale.size
    arrays = (array.ctypes.data for array in (rows, scale, shift))
    compute(*arrays, num_rows, num_cols, eps, found.ctypes.data)
    return found
