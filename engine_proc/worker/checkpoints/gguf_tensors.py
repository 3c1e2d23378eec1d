"""Opens the weights of a GGUF file."""

from headrace.engine_proc.worker.checkpoints.mapped_file import map_file
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor
from headrace.model.gguf import BLOCK_TYPES, GgufFile


def open_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """Return the file's tensors under its own names, as views: nothing is decoded."""
    data = {path: map_file(path) for path in {tensor.path for tensor in file.tensors}}
    return {
        tensor.name: StoredTensor(
            Format(BLOCK_TYPES[tensor.type].name),
            tensor.shape,
            data[tensor.path][tensor.offset : tensor.offset + tensor.nbytes],
        )
        for tensor in file.tensors
    }
