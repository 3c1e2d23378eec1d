"""Opens the weights of safetensors files: one file, or shards with an index.

Format: the header's length (8 bytes), the header (JSON: name -> dtype, shape, offsets), the data.
"""

import math
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.mapped_file import map_file
from headrace.engine_proc.worker.weights import Format, StoredTensor
from headrace.errors import BAD_JSON, ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NUMBER_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # the dtypes that can be executed
OTHER_BYTES = {"F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class Entry(msgspec.Struct):
    """What the header says of a tensor. Offsets are bytes, counted from the header's end."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


Located = tuple[Entry, npt.NDArray[np.uint8]]  # and where its data lies


class Index(msgspec.Struct):
    """`model.safetensors.index.json`: in which shard each tensor is."""

    weight_map: dict[str, str]


def open_folder(folder: Path, but: tuple[str, ...] = ()) -> dict[str, StoredTensor]:
    """Return the tensors of a Hugging Face folder under their own names, as views.

    Args:
        but: beginnings of names that are passed over.
    Raises:
        ModelError: a file is missing or broken.
    """
    return {
        name: StoredTensor(Format(entry.dtype), tuple(entry.shape), data)
        for name, (entry, data) in read_folder(folder, executable=True, but=but).items()
    }


def check_folder(folder: Path) -> None:
    """Raise what `open_folder` does, except that tensors may be of any dtype."""
    read_folder(folder, executable=False)


def read_folder(folder: Path, *, executable: bool, but: tuple[str, ...] = ()) -> dict[str, Located]:
    """Return the entries of a folder: its one file's, or its shards'."""
    if (folder / SINGLE).exists():
        return read_file(folder / SINGLE, executable=executable, but=but)
    index_path = folder / INDEX
    if not index_path.exists():
        raise ModelError(f"{folder}: has neither {SINGLE} nor {INDEX}")
    try:
        weight_map = msgspec.json.decode(index_path.read_bytes(), type=Index).weight_map
    except (OSError, *BAD_JSON) as error:
        raise ModelError(f"{index_path}: cannot be read: {error}") from error
    weight_map = {name: shard for name, shard in weight_map.items() if not name.startswith(but)}
    shards = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        if not path.exists():
            raise ModelError(f"{path}: missing, and {index_path.name} lists it")
        shards[shard] = read_file(path, executable=executable, but=but)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ModelError(f"{folder / shard}: lacks {name!r}, which the index lists")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def read_file(path: Path, *, executable: bool, but: tuple[str, ...] = ()) -> dict[str, Located]:
    """Return the entries of one file, checked against its size; `executable` ones, or any."""
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
        if name.startswith(but):
            continue
        entry = parse_entry(path, name, raw, executable)
        begin, end = entry.data_offsets
        if end > len(body):
            raise ModelError(
                f"{path}: truncated: tensor {name!r} ends at byte {start + end}, "
                f"the file at {len(data)}"
            )
        tensors[name] = entry, body[begin:end]
    return tensors


def parse_entry(path: Path, name: str, raw: msgspec.Raw, executable: bool) -> Entry:
    """Decode one header entry, and check that dtype, shape and offsets agree."""
    try:
        entry = msgspec.json.decode(raw, type=Entry)
    except BAD_JSON as error:
        raise ModelError(f"{path}: tensor {name!r} has a broken header: {error}") from error
    if executable and entry.dtype not in NUMBER_BYTES:
        raise ModelError(
            f"{path}: tensor {name!r} is stored as {entry.dtype}; "
            f"supported are {', '.join(NUMBER_BYTES)}"
        )
    begin, end = entry.data_offsets
    number_bytes = (NUMBER_BYTES | OTHER_BYTES).get(entry.dtype)
    nbytes = end - begin if number_bytes is None else number_bytes * math.prod(entry.shape)
    if min(begin, *entry.shape, 0) < 0 or end - begin != nbytes:
        raise ModelError(
            f"{path}: tensor {name!r} has offsets {begin} to {end}, "
            f"but {entry.dtype} {entry.shape} takes {nbytes} bytes"
        )
    return entry
