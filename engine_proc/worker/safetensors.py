"""Opens the weights of safetensors files: one file, or shards with an index.

Format: the header's length (8 bytes), the header (JSON: name -> dtype, shape, offsets), the data.
"""

import math
from pathlib import Path

import msgspec

from headrace.engine_proc.worker.mapped_file import map_file
from headrace.engine_proc.worker.weights import Format, StoredTensor
from headrace.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NUMBER_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # the dtypes that can be executed


class Entry(msgspec.Struct):
    """What the header says of a tensor. Offsets are bytes, counted from the header's end."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Index(msgspec.Struct):
    """`model.safetensors.index.json`: in which shard each tensor is."""

    weight_map: dict[str, str]


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a Hugging Face folder under their own names, as views.

    Raises:
        ModelError: a file is missing or broken.
    """
    if (folder / SINGLE).exists():
        return open_file(folder / SINGLE)
    index_path = folder / INDEX
    if not index_path.exists():
        raise ModelError(f"{folder}: has neither {SINGLE} nor {INDEX}")
    try:
        weight_map = msgspec.json.decode(index_path.read_bytes(), type=Index).weight_map
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{index_path}: cannot be read: {error}") from error
    return open_shards(index_path, weight_map)


def open_shards(index_path: Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    """Open every shard once, and take each tensor from the shard that the index names."""
    shards: dict[str, dict[str, StoredTensor]] = {}
    for shard in sorted(set(weight_map.values())):
        path = index_path.parent / shard
        if not path.exists():
            raise ModelError(f"{path}: missing, and {index_path.name} lists it")
        shards[shard] = open_file(path)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ModelError(f"{index_path.parent / shard}: lacks {name!r}, which the index lists")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file under their own names, as views."""
    data = map_file(path)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or start > len(data):
        raise ModelError(
            f"{path}: truncated or not safetensors: the header would end at byte {start}, "
            f"the file ends at {len(data)}"
        )
    try:
        header = msgspec.json.decode(data[8:start].tobytes(), type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: the header is not a JSON object: {error}") from error
    header.pop("__metadata__", None)
    body = data[start:]
    tensors = {}
    for name, raw in header.items():
        entry = parse_entry(path, name, raw)
        begin, end = entry.data_offsets
        if end > len(body):
            raise ModelError(
                f"{path}: truncated: tensor {name!r} ends at byte {start + end}, "
                f"the file at {len(data)}"
            )
        tensors[name] = StoredTensor(Format(entry.dtype), tuple(entry.shape), body[begin:end])
    return tensors


def parse_entry(path: Path, name: str, raw: msgspec.Raw) -> Entry:
    """Decode one header entry, and check that dtype, shape and offsets agree."""
    try:
        entry = msgspec.json.decode(raw, type=Entry)
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: tensor {name!r} has a broken header: {error}") from error
    if entry.dtype not in NUMBER_BYTES:
        raise ModelError(
            f"{path}: tensor {name!r} is stored as {entry.dtype}; "
            f"supported are {', '.join(NUMBER_BYTES)}"
        )
    begin, end = entry.data_offsets
    nbytes = NUMBER_BYTES[entry.dtype] * math.prod(entry.shape)
    if min(begin, *entry.shape, 0) < 0 or end - begin != nbytes:
        raise ModelError(
            f"{path}: tensor {name!r} has offsets {begin} to {end}, "
            f"but {entry.dtype} {entry.shape} takes {nbytes} bytes"
        )
    return entry
