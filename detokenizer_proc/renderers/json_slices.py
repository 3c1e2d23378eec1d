"""JSON in slices: a body as long as a request made it is encoded a little at a time.

What is long in a body is a `LazyList`, whose items are made while they are encoded. The slices
together are what `msgspec.json.encode` makes of the same body with lists. A struct is encoded at
once unless it holds a long list or a lazy one.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

SLICE_BYTES = 64 << 10  # some 3 ms of work, and one item more
NUMBERS = 4096  # of an array, encoded at once
MAX_ITEMS = 64  # of a list in a struct that is encoded at once

encode = msgspec.json.encode


class LazyList:
    """A list of what `form` makes of `items`. With `is_deep` its items may have such lists."""

    def __init__(
        self, items: "Sequence[Any] | LazyList", form: Callable[[Any], Any], is_deep: bool = False
    ) -> None:
        self._items = items
        self._form = form
        self.is_deep = is_deep

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: int) -> Any:
        return self._form(self._items[place])

    def __iter__(self) -> Iterator[Any]:
        return map(self._form, self._items)


def slices(body: Any, num_bytes: int = SLICE_BYTES) -> Iterator[bytes]:
    """Yield a body's JSON in slices of at least `num_bytes`; the last is shorter, maybe empty."""
    slice = bytearray()
    for part in parts(body):
        slice += part
        if len(slice) >= num_bytes:
            yield bytes(slice)
            slice.clear()
    yield bytes(slice)


def parts(value: Any) -> Iterator[bytes]:
    """Yield a value's JSON item by item."""
    if isinstance(value, msgspec.Struct) and is_sliced(value):
        value = fields_of(value)
    if isinstance(value, dict):
        mark = b"{"
        for name, one in value.items():
            yield mark + encode(name) + b":"
            yield from parts(one)
            mark = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, array):
        yield b"["
        for start in range(0, len(value), NUMBERS):
            numbers = encode(value[start : start + NUMBERS].tolist())[1:-1]
            yield b"," + numbers if start else numbers
        yield b"]"
    elif isinstance(value, list | LazyList):
        yield from parts_of_list(value, isinstance(value, list) or value.is_deep)
    else:
        yield encode(value)


def is_sliced(value: Any) -> bool:
    """Whether a value is a list that is encoded item by item, or holds one."""
    if isinstance(value, msgspec.Struct):
        return any(map(is_sliced, msgspec.structs.astuple(value)))
    if isinstance(value, list):
        return len(value) > MAX_ITEMS or any(map(is_sliced, value))
    return isinstance(value, LazyList | array)


def fields_of(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a struct that `msgspec.json.encode` writes, its tag first."""
    config, names = struct.__struct_config__, struct.__struct_encode_fields__
    fields: dict[str, Any] = {} if config.tag_field is None else {config.tag_field: config.tag}
    fields |= zip(names, msgspec.structs.astuple(struct), strict=True)
    return {name: value for name, value in fields.items() if value is not msgspec.UNSET}


def parts_of_list(items: list[Any] | LazyList, is_deep: bool) -> Iterator[bytes]:
    """Yield a list's JSON item by item."""
    yield b"["
    mark = b""
    if is_deep:
        for item in items:
            yield mark
            yield from parts(item)
            mark = b","
    else:
        for item in items:
            yield mark + encode(item)
            mark = b","
    yield b"]"


def eager(columns: Any) -> Any:
    """Return a struct or an object with lists in the place of lazy ones, for an event."""
    if columns is None:
        return None
    is_struct = isinstance(columns, msgspec.Struct)
    fields = fields_of(columns) if is_struct else columns
    lists = {
        name: list(value) if isinstance(value, LazyList | array) else value
        for name, value in fields.items()
    }
    return type(columns)(**lists) if is_struct else lists
