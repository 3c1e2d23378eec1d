"""Opens the weights of a GGUF file."""

from collections.abc import Iterator, Mapping

import numpy as np

from headrace.engine_proc.worker.checkpoints.mapped_file import map_file
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor
from headrace.errors import ModelError
from headrace.model.gguf import BLOCK_TYPES, GgufFile


def open_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """Return the file's tensors under its own names, as views: nothing is decoded.

    What Apertus learns for each layer's activation are keys of the file. They become tensors.
    """
    data = {path: map_file(path) for path in {tensor.path for tensor in file.tensors}}
    tensors = {
        tensor.name: StoredTensor(
            Format(BLOCK_TYPES[tensor.type].name),
            tensor.shape,
            data[tensor.path][tensor.offset : tensor.offset + tensor.nbytes],
        )
        for tensor in file.tensors
    }
    return tensors | dict(xielu_tensors(file.metadata))


def xielu_tensors(metadata: Mapping[str, object]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a vector of one number for each layer and key of xIELU.

    Raises:
        ModelError: a key is no list of numbers.
    """
    for key in (key for key in metadata if key.startswith("xielu.")):
        values = metadata[key]
        if not isinstance(values, list) or not all(isinstance(value, float) for value in values):
            raise ModelError(f"{key} is {values!r}, not a list of numbers")
        for layer, value in enumerate(values):
            number = np.array([value], np.float32).view(np.uint8)
            yield f"blk.{layer}.{key}", StoredTensor(Format.F32, (1,), number)
