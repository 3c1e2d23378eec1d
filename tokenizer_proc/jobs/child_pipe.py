"""Messages between a tokenizer process and a child of its own, each after its length, u32."""

import struct
from typing import IO, TypeVar

import msgspec

T = TypeVar("T")
LENGTH = struct.Struct("<I")


def write(sink: IO[bytes], message: msgspec.Struct) -> None:
    """Write a message."""
    data = msgspec.msgpack.encode(message)
    sink.write(LENGTH.pack(len(data)))
    sink.write(data)
    sink.flush()


def read(source: IO[bytes], kind: type[T]) -> T | None:
    """Read a message; return None at the end, be it in the middle of one."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = source.read(length)
    return msgspec.msgpack.decode(data, type=kind) if len(data) == length else None
