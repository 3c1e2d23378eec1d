"""GGUF files, as far as they describe themselves: metadata and where each tensor lies.

Pure standard library, for processes that need the vocabulary but none of the weights. Format:
magic, version, two counts, then key-value pairs, then one entry per tensor, then, aligned, data.
"""

import math
import mmap
import re
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headrace.errors import ModelError
from headrace.model.string_array import LENGTH, StringArray


class BlockType(NamedTuple):
    """A ggml type: `numbers` consecutive numbers of a row take `nbytes` bytes."""

    name: str
    numbers: int
    nbytes: int


# The types that can be executed, as stored or decoded, by ggml's id. A file with any other is
# refused when opened.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}
# Of the others, those that ggml names; some were withdrawn.
OTHER_TYPES = {
    **{9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4"},
    **{4: "Q4_2", 5: "Q4_3", 41: "Q1_0"},
}

# Metadata types by GGUF's id: numbers as codes of `struct`, then the two that vary in size.
FIXED_TYPES = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 4  # ggml's own limit
SPLIT_NAME = re.compile(
    r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf"
)  # as llama.cpp's tools write


class GgufTensor(NamedTuple):
    """One entry of the tensor table."""

    name: str
    type: int  # a key of BLOCK_TYPES
    shape: tuple[int, ...]  # rows first, unlike in the file
    offset: int  # bytes from the start of the file
    nbytes: int
    path: Path  # of the file, or of the part of a split one


def type_name(kind: int) -> str:
    """Return the name of a ggml type, by its id."""
    block = BLOCK_TYPES.get(kind)
    return block.name if block else OTHER_TYPES.get(kind, f"an unknown type, {kind}")


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensor table of a GGUF file, or of all parts of a split one."""

    path: Path
    metadata: dict[str, object]  # numbers, bools, strings, lists of numbers, `StringArray`s
    tensors: list[GgufTensor]


def read_metadata(path: Path | str) -> GgufFile:
    """Read everything but the weights. Any part of a split file stands for all of its parts.

    Raises:
        ModelError: not a GGUF file this can read, or cut short: every tensor lies within its file.
            Or a part of a split file is missing, or another one lies in its place.
    """
    path = Path(path)
    file = _read_file(path)
    count = file.metadata.get("split.count", 0)
    if count in (0, 1):  # merging the parts leaves a 0
        return file
    if not isinstance(count, int):
        raise ModelError(f"{path}: split.count is {count!r:.40}, not a number of parts")
    parts = split_paths(path)
    if len(parts) != count:
        raise ModelError(
            f"{path}: one part of a split file, by its split.count of {count}; "
            f"its name has to end in -00001-of-{count:05}.gguf and the like, beside the others"
        )
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise ModelError(
            f"{path}: {len(missing)} of the {count} parts are missing beside it: "
            f"{', '.join(missing[:3])}{', ...' if missing[3:] else ''}"
        )
    return _join([file if part == path else _read_file(part) for part in parts])


def split_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a split file, told by its name; of any other, its own."""
    match = SPLIT_NAME.fullmatch(path.name)
    count = int(match["count"]) if match else 0
    if match is None or count == 0:
        return [path]
    names = (f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))
    return [path.with_name(name) for name in names]


def _join(parts: list[GgufFile]) -> GgufFile:
    """Return the parts of a split file as one, with the metadata of the first."""
    first = parts[0]
    total = first.metadata.get("split.tensors.count")
    for number, part in enumerate(parts):
        for key, expected in (
            ("split.no", number),
            ("split.count", len(parts)),
            ("split.tensors.count", total),
        ):
            found = part.metadata.get(key)
            if found != expected:
                raise ModelError(
                    f"{part.path}: {key} is {found!r:.40}, not {expected!r:.40}: "
                    f"it is no part, or another part, of the split file {first.path.name}"
                )
    places: dict[str, Path] = {}
    tensors = [tensor for part in parts for tensor in part.tensors]
    for tensor in tensors:
        if tensor.name in places:
            raise ModelError(
                f"{tensor.path}: tensor {tensor.name!r} is in {places[tensor.name].name} too"
            )
        places[tensor.name] = tensor.path
    if len(tensors) != total:
        raise ModelError(
            f"{first.path}: its {len(parts)} parts have {len(tensors)} tensors; "
            f"split.tensors.count is {total!r}"
        )
    return GgufFile(first.path, first.metadata, tensors)


def _read_file(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).file()
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path}: cannot be read: {error}") from error


class _Reader:
    """A cursor over a mapped file. Every way past the end ends in one "truncated" error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def file(self) -> GgufFile:
        try:
            num_tensors, num_pairs = self.head()
            metadata = dict(self.pair() for _ in range(num_pairs))
            entries = [self.entry() for _ in range(num_tensors)]
        except (struct.error, IndexError, OverflowError, MemoryError):
            raise ModelError(
                f"{self.path}: truncated or corrupt: byte {self.at} of {len(self.data)} is still "
                "within the header; download the file again"
            ) from None
        tensors = self.place(entries, metadata.get("general.alignment", 32))
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise ModelError(f"{self.path}: two tensors have the same name")
        return GgufFile(self.path, metadata, tensors)

    def head(self) -> tuple[int, int]:
        """Check magic and version; return the numbers of tensors and of metadata pairs."""
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file: it starts with {self.data[:4]!r}")
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path}: GGUF version {version} (0x{version:08x}); "
                "only little-endian files of version 2 or 3 can be read"
            )
        return self.number("Q"), self.number("Q")

    def number(self, code: str) -> int:
        (value,) = self.numbers(code, 1)
        return int(value)

    def numbers(self, code: str, count: int) -> tuple[int | float | bool, ...]:
        """Read `count` little-endian numbers of struct's `code`."""
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def strings(self, count: int) -> StringArray:
        """Find strings, each behind its length. Vocabularies have 100k: hence the local names."""
        data, first, unpack, skipped = self.data, self.at, LENGTH.unpack_from, LENGTH.size
        at = first + skipped
        starts = array("Q", [skipped])
        for _ in range(count):
            at += unpack(data, at - skipped)[0] + skipped
            starts.append(at - first)
        self.at = at - skipped
        if self.at > len(data):
            raise IndexError
        return StringArray(data[first : self.at], starts, str(self.path))

    def string(self) -> str:
        size = self.number("Q")
        raw = self.data[self.at : self.at + size]
        self.at += size
        if self.at > len(self.data):
            raise IndexError
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: a string before byte {self.at} is not UTF-8") from error

    def pair(self) -> tuple[str, object]:
        key = self.string()
        kind = self.number("I")
        if kind == STRING:
            return key, self.string()
        if kind in FIXED_TYPES:
            return key, self.numbers(FIXED_TYPES[kind], 1)[0]
        if kind == ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind == STRING:
                return key, self.strings(count)
            if kind in FIXED_TYPES:
                return key, list(self.numbers(FIXED_TYPES[kind], count))
        raise ModelError(
            f"{self.path}: metadata {key!r} has unknown type {kind} before byte {self.at}"
        )

    def entry(self) -> GgufTensor:
        """Read one entry of the table. Its offset still counts from the start of the data."""
        name = self.string()
        num_dims = self.number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise ModelError(f"{self.path}: tensor {name!r} has {num_dims} dimensions")
        shape = tuple(int(size) for size in reversed(self.numbers("Q", num_dims)))
        kind = self.number("I")
        if kind not in BLOCK_TYPES:
            supported = ", ".join(block.name for block in BLOCK_TYPES.values())
            raise ModelError(
                f"{self.path}: tensor {name!r} is stored as {type_name(kind)}; "
                f"supported are {supported}"
            )
        block = BLOCK_TYPES[kind]
        if num_dims == 1 and block.numbers > 1:
            raise ModelError(
                f"{self.path}: tensor {name!r} is a vector in {block.name}; "
                "vectors are F32, F16 or BF16"
            )
        if shape[-1] % block.numbers or 0 in shape:
            raise ModelError(
                f"{self.path}: tensor {name!r} of shape {shape} is not made of whole "
                f"{block.name} blocks of {block.numbers}"
            )
        nbytes = block.nbytes * (math.prod(shape) // block.numbers)
        return GgufTensor(name, kind, shape, self.number("Q"), nbytes, self.path)

    def place(self, entries: list[GgufTensor], alignment: object) -> list[GgufTensor]:
        """Turn offsets into absolute ones, and check that every tensor lies within the file."""
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}, not a size")
        start = -(-self.at // alignment) * alignment
        placed = [entry._replace(offset=start + entry.offset) for entry in entries]
        for tensor in placed:
            if tensor.offset + tensor.nbytes > len(self.data):
                raise ModelError(
                    f"{self.path}: truncated: tensor {tensor.name!r} ends at byte "
                    f"{tensor.offset + tensor.nbytes}, the file at {len(self.data)}"
                )
        return placed
