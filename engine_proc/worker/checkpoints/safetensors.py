"""Opens the weights of safetensors files: one file, or shards with an index.

Format: the header's length (8 bytes), the header (JSON: name -> dtype, shape, offsets), the data.
"""

import math
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.mapped_file import map_file
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor
from headrace.errors import BAD_JSON, ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NUMBER_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # the dtypes that can be executed
EXECUTABLE = tuple(NUMBER_BYTES)
PACKED_BYTES = {"F8_E4M3": 1, "I32": 4, "I64": 8, "U8": 1}  # of quantized matrices, beside those
OTHER_BYTES = {"F64": 8, "I16": 2, "I8": 1, "BOOL": 1}
KNOWN_BYTES = NUMBER_BYTES | PACKED_BYTES | OTHER_BYTES

# Constants that old files of GPT-NeoX have: which tokens attention sees, and minus infinity.
MASKS = (".attention.bias", ".attention.masked_bias")


class TensorEntry(msgspec.Struct):
    """The header's entry of a tensor. Offsets are bytes, counted from the header's end."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


Located = tuple[TensorEntry, npt.NDArray[np.uint8]]  # and where its data lies


class Index(msgspec.Struct):
    """`model.safetensors.index.json`: in which shard each tensor is."""

    weight_map: dict[str, str]


def open_folder(
    folder: Path, but: tuple[str, ...] = (), *, is_quantized: bool = False
) -> dict[str, StoredTensor]:
    """Return the tensors of a Hugging Face folder under their own names, as views.

    Args:
        but: beginnings of names that are passed over.
        is_quantized: tensors may be parts of quantized matrices.
    Raises:
        ModelError: a file is missing or broken.
    """
    dtypes = (*EXECUTABLE, *PACKED_BYTES) if is_quantized else EXECUTABLE
    return {
        name: StoredTensor(Format(entry.dtype), tuple(entry.shape), data)
        for name, (entry, data) in read_folder(folder, dtypes, but).items()
    }


def check_folder(folder: Path) -> None:
    """Raise what `open_folder` does, except that tensors may be of any dtype."""
    read_folder(folder, None)


def read_folder(
    folder: Path, dtypes: tuple[str, ...] | None, but: tuple[str, ...] = ()
) -> dict[str, Located]:
    """Return the entries of a folder: its one file's, or its shards'; of some dtypes, or of any."""
    if (folder / SINGLE).exists():
        return read_file(folder / SINGLE, dtypes, but)
    index_path = folder / INDEX
    if not index_path.exists():
        raise ModelError(f"{folder}: has neither {SINGLE} nor {INDEX}")
    try:
        weight_map = msgspec.json.decode(index_path.read_bytes(), type=Index).weight_map
    except (OSError, *BAD_JSON) as error:
        raise ModelError(f"{index_path}: cannot be read: {error}") from error
    weight_map = {
        name: shard for name, shard in weight_map.items() if not is_passed_over(name, but)
    }
    shards = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        if not path.exists():
            raise ModelError(f"{path}: missing, and {index_path.name} lists it")
        shards[shard] = read_file(path, dtypes, but)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ModelError(f"{folder / shard}: lacks {name!r}, which the index lists")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def read_file(
    path: Path, dtypes: tuple[str, ...] | None = EXECUTABLE, but: tuple[str, ...] = ()
) -> dict[str, Located]:
    """Return the entries of one file, checked against its size."""
    data = map_file(path)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or start > len(data):
        raise ModelError(
            f"{path}: truncated or not safetensors: the header would end at byte {start}, "
            f"the file ends at {len(data)}"
        )
    try:
        header = msgspec.json.decode(data[8:start].tobytes(), type=dict[str, msgspec.Raw])
    except BAD_JSON as error:
        raise ModelError(f"{path}: the header is not a JSON object: {error}") from error
    header.pop("__metadata__", None)
    body = data[start:]
    tensors = {}
    for name, raw in header.items():
        if is_passed_over(name, but):
            continue
        entry = parse_entry(path, name, raw, dtypes)
        begin, end = entry.data_offsets
        if end > len(body):
            raise ModelError(
                f"{path}: truncated: tensor {name!r} ends at byte {start + end}, "
                f"the file at {len(data)}"
            )
        tensors[name] = entry, body[begin:end]
    return tensors


def is_passed_over(name: str, but: tuple[str, ...]) -> bool:
    """Whether nothing reads a tensor."""
    return name.startswith(but) or name.endswith(MASKS)


def parse_entry(
    path: Path, name: str, raw: msgspec.Raw, dtypes: tuple[str, ...] | None
) -> TensorEntry:
    """Decode one header entry, and check that dtype, shape and offsets agree."""
    try:
        entry = msgspec.json.decode(raw, type=TensorEntry)
    except BAD_JSON as error:
        raise ModelError(f"{path}: tensor {name!r} has a broken header: {error}") from error
    if dtypes is not None and entry.dtype not in dtypes:
        raise ModelError(
            f"{path}: tensor {name!r} is stored as {entry.dtype}; supported are {', '.join(dtypes)}"
        )
    begin, end = entry.data_offsets
    number_bytes = KNOWN_BYTES.get(entry.dtype)
    nbytes = end - begin if number_bytes is None else number_bytes * math.prod(entry.shape)
    if min(begin, *entry.shape, 0) < 0 or end - begin != nbytes:
        raise ModelError(
            f"{path}: tensor {name!r} has offsets {begin} to {end}, "
            f"but {entry.dtype} {entry.shape} takes {nbytes} bytes"
        )
    return entry
