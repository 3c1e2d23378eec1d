"""Triton's interpreter, with the same results in less time.

Most of its time is no arithmetic. For each operation it describes types anew, and spreads numbers
and rows to whole blocks, which numpy does by itself. For each launch and each call of a function it
prepares `triton.language` again.

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
OFFSETS = {"int32", "int64"}  # what is added to pointers
NUMBERS = {bool, int, float}
BF16_BITS = np.uint32(16)  # that float32 has behind those of bf16


@contextmanager
def quick_interpreter() -> Iterator[interpreter._LangPatchScope]:
    """Have kernels interpreted quickly in this process; yield what has been set for it."""
    set_member, interpreter._patch_attr = interpreter._patch_attr, set_direct
    try:
        scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    finally:
        interpreter._patch_attr = set_member
    for owner, name, quicker in QUICKER:
        scope.set_attr(owner, name, quicker(getattr(owner, name)))
    try:
        yield scope
    finally:
        scope.restore()


@contextmanager
def own_interpreter(scope: interpreter._LangPatchScope) -> Iterator[None]:
    """Have kernels interpreted as by Triton itself, in the midst of `quick_interpreter`."""
    quicker = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
    scope.restore()
    try:
        yield
    finally:
        for change in quicker:
            scope.set_attr(*change)


def set_direct(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    """Have a member of the language called without the checks around it."""
    body = getattr(member, "__wrapped__", member)

    def call(*args: Any, _semantic: Any = None, **named: Any) -> Any:
        return body(*args, **named, _semantic=interpreter.interpreter_semantic)

    scope.set_attr(owner, name, call)


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


class Operands:
    """Pairs of operands that numpy takes as they are: it spreads a row over a block's others."""

    def __init__(self) -> None:
        self._types: dict[tuple[str, str], tuple[Any, Any]] = {}  # of what is spread
        self._constants: dict[tuple[Any, ...], Any] = {}

    def spread(self, semantic: Any, one: Any, other: Any) -> tuple[Any, Any]:
        """Return two blocks with the type that both have when they are spread."""
        names = one.type.name, other.type.name
        if names[0] == names[1]:
            return one, other
        if names not in self._types:
            wide, other_wide = semantic.broadcast_impl_value(one, other)
            self._types[names] = wide.type, other_wide.type
        wide_type, other_type = self._types[names]
        return tl.tensor(one.handle, wide_type), tl.tensor(other.handle, other_type)

    def constant(self, semantic: Any, number: Any, beside: Any, divides: bool) -> Any:
        """Return a number in a tensor's type; none, where their result has another one."""
        if beside.dtype.name not in KEPT:
            return None
        exact = number.hex() if type(number) is float else number
        key = (beside.dtype.name, type(number), exact, divides)
        if key not in self._constants:
            own = semantic.to_tensor_type(number)
            result = semantic.computation_type_impl(beside.dtype, False, own, True, divides)
            made = semantic._cast_to_computation_type(number, result)
            self._constants[key] = made.handle if result.name == beside.dtype.name else None
        handle = self._constants[key]
        return None if handle is None else tl.tensor(handle, beside.type)


def like_types(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Leave operands of one type as they are, where that is the type of the result.

    A number becomes a constant once.
    """
    operands = Operands()

    def converted(
        self: Any,
        one: Any,
        other: Any,
        may_point: bool = False,
        other_may_point: bool = False,
        is_arithmetic: bool = True,
        divides: bool = False,
    ) -> Any:
        kinds, made = (type(one), type(other)), None
        if kinds == (tl.tensor, tl.tensor):
            name, others = one.dtype.name, other.dtype.name
            is_pointer = may_point and others in OFFSETS and one.dtype.is_ptr()
            if is_pointer or (name == others and name in KEPT):
                return operands.spread(self, one, other)
        elif is_arithmetic and kinds[0] is tl.tensor and kinds[1] in NUMBERS:
            made = operands.constant(self, other, one, divides)
        elif is_arithmetic and kinds[1] is tl.tensor and kinds[0] in NUMBERS:
            made = operands.constant(self, one, other, divides)
        if made is None:
            return convert(self, one, other, may_point, other_may_point, is_arithmetic, divides)
        return (one, made) if kinds[0] is tl.tensor else (made, other)

    return converted


def bare(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return tensors and constants' values at once; others may be lists of constants."""

    def unwrapped(own: Any) -> Any:
        kind = type(own)
        if kind is tl.tensor or kind is int:
            return own
        return own.value if kind is tl.constexpr else unwrap(own)

    return unwrapped


def same_first(equals: Callable[..., bool]) -> Callable[..., bool]:
    """Compare no type with itself."""
    return lambda self, other: self is other or equals(self, other)


def unchecked(_init: Callable[..., None]) -> Callable[..., None]:
    """Take numpy's numbers without asking for their size, which the interpreter has chosen."""

    def init(self: Any, data: Array, dtype: Any) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}

    return init


def viewed(_expand: Callable[..., Any]) -> Callable[..., Any]:
    """Give numbers one more axis, without numpy's checks of it."""

    def expanded(self: Any, handle: Any, axis: int) -> Any:
        shape = handle.data.shape
        data = handle.data.reshape(*shape[:axis], 1, *shape[axis:])
        return interpreter.TensorHandle(data, handle.dtype.scalar)

    return expanded


def unasked(_check: Callable[..., None]) -> Callable[..., None]:
    """Reckon no overflows: without Triton's `debug` the interpreter says nothing of them."""
    return lambda *_: None


QUICKER: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (interpreter, "_patch_lang", prepared),
    (interpreter, "_get_np_dtype", by_name),
    (interpreter, "_convert_float", looked_up),
    (tl.block_type, "__init__", known_blocks),
    (tl.tensor, "__init__", known_tensors),
    (tl.dtype, "__eq__", same_first),
    (tl.core, "_unwrap_if_constexpr", bare),
    (interpreter.TensorHandle, "__init__", unchecked),
    (interpreter.InterpreterBuilder, "create_expand_dims", viewed),
    (TritonSemantic, "broadcast_impl_value", like_shapes),
    (TritonSemantic, "binary_op_type_checking_impl", like_types),
    (TritonSemantic, "binary_op_sanitize_overflow_impl", unasked),
)

if __name__ == "__main__":
    del sys.argv[0]
    with quick_interpreter():
        runpy.run_path(sys.argv[0], run_name="__main__")
