"""The weights of a GGUF projector file as a state dict of transformers' module."""

import math
from collections import Counter

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.gguf_tensors import open_tensors
from headrace.model.gguf import GgufFile, type_name
from headrace.model.mmproj import Mmproj
from headrace.model.mmproj_weights import TensorLayout, tower_weights

Floats = npt.NDArray[np.float32]
DTYPES = {"F32": "float32", "BF16": "bfloat16"}  # of types; of all others float16


def state_of(mmproj: Mmproj) -> dict[str, Floats]:
    """Decode a projector file.

    Raises:
        ModelError: a tensor is missing, has another shape than the metadata says, or is left over.
    """
    stored = open_tensors(mmproj.file)
    return {
        name: joined([stored[tensor].to_float32() for tensor in weight.tensors], weight.layout)
        for name, weight in tower_weights(mmproj).items()
    }


def joined(tensors: list[Floats], layout: TensorLayout) -> Floats:
    """Return the weight that tensors make."""
    match layout:
        case TensorLayout.PLAIN:
            return tensors[0]
        case TensorLayout.ROWS:
            return np.concatenate(tensors)
        case TensorLayout.FRAMES:
            return np.stack(tensors, axis=2)
        case TensorLayout.ONE_PLUS:
            return tensors[0] - np.float32(1)


def dtype_of(file: GgufFile) -> str:
    """Return the type of most of a file's numbers, as torch names it."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors:
        sizes[type_name(tensor.type)] += math.prod(tensor.shape)
    return DTYPES.get(max(sizes, key=lambda name: sizes[name]), "float16")
