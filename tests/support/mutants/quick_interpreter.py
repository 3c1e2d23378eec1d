"""Triton's interpreter, with the same results in less time.

Most of its time is no arithmetic. For each operation it describes types anew. For each launch and
each call of a function it prepares `triton.language` again.

As a program it runs another one, whose path and arguments it takes.
"""

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Array = npt.NDArray[Any]
KEPT = {"int1", "int32", "uint32", "int64", "uint64", "fp32"}  # an operation of two gives the same
BF16_BITS = np.uint32(16)  # that float32 has behind those of bf16


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Have kernels interpreted quickly in this process."""
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    for owner, name, quicker in QUICKER:
        scope.set_attr(owner, name, quicker(getattr(owner, name)))
    try:
        yield
    finally:
        scope.restore()


def prepared(_patch: Any) -> Callable[[Any], Any]:
    """Leave the language as it is."""
    return lambda _fn: interpreter._LangPatchScope()


def by_name(numpy_type: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """Look types of numpy up by the names of Triton's."""
    known: dict[str, np.dtype[Any]] = {}

    def find(own: Any) -> np.dtype[Any]:
        found = known.get(own.name)
        if found is None:
            found = known[own.name] = numpy_type(own)
        return found

    return find


def known_blocks(make: Callable[..., None]) -> Callable[..., None]:
    """Describe a type of blocks once."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = (element_ty.name, *sizes)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    return init


def known_tensors(make: Callable[..., None]) -> Callable[..., None]:
    """Describe the shape of tensors of a type once."""
    known: dict[str, tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            make(self, handle, type)
            known[type.name] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known[type.name]

    return init


def looked_up(convert: Callable[..., Array]) -> Callable[..., Array]:
    """Convert all floats of 8 and of 16 bits once, and cut float32 to bf16 by a shift."""
    tables: dict[tuple[Any, ...], Array] = {}

    def converted(numbers: Array, source: Any, target: Any, rounding: Any) -> Array:
        bits = source.primitive_bitwidth
        if bits <= 16:
            key = (source.name, target.name, rounding)
            if key not in tables:
                every = np.arange(1 << bits, dtype=f"u{bits // 8}")
                tables[key] = convert(every, source, target, rounding)
            return tables[key][numbers.view(f"u{bits // 8}")]
        if (source, target, rounding) == (tl.float32, tl.bfloat16, None):
            return (numbers.view(np.uint32) >> BF16_BITS).astype(np.uint16)
        return convert(numbers, source, target, rounding)

    return converted


def like_shapes(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Leave blocks of one shape as they are."""

    def broadcasted(self: Any, one: Any, other: Any) -> Any:
        is_like = one.type.is_block() and other.type.is_block()
        if is_like and one.type.shape.values == other.type.shape.values:
            return one, other
        return broadcast(self, one, other)

    return broadcasted


def like_types(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Leave operands of one type as they are, where that is the type of the result."""

    def converted(self: Any, one: Any, other: Any, *args: Any, **named: Any) -> Any:
        are_tensors = type(one) is type(other) is tl.tensor
        if are_tensors and one.type.name == other.type.name and one.dtype.name in KEPT:
            return one, other
        return convert(self, one, other, *args, **named)

    return converted


def unasked(_check: Callable[..., None]) -> Callable[..., None]:
    """Reckon no overflows: without Triton's `debug` the interpreter says nothing of them."""
    return lambda *_: None


QUICKER: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (interpreter, "_patch_lang", prepared),
    (interpreter, "_get_np_dtype", by_name),
    (interpreter, "_convert_float", looked_up),
    (tl.block_type, "__init__", known_blocks),
    (tl.tensor, "__init__", known_tensors),
    (TritonSemantic, "broadcast_impl_value", like_shapes),
    (TritonSemantic, "binary_op_type_checking_impl", like_types),
    (TritonSemantic, "binary_op_sanitize_overflow_impl", unasked),
)

if __name__ == "__main__":
    del sys.argv[0]
    with quick_interpreter():
        runpy.run_path(sys.argv[0], run_name="__main__")
