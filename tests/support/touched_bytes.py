"""Which bytes kernels touch, where Triton interprets them: each once, by the memory they are in."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

Addresses = list[npt.NDArray[np.int64]]


class TouchedBytes:
    """What each launch has read and written, in order: bytes by where storages begin."""

    def __init__(self) -> None:
        self.read: list[Counter[int]] = []
        self.written: list[Counter[int]] = []
        self._now: tuple[dict[int, Addresses], dict[int, Addresses]] = {}, {}

    def note(self, is_write: bool, pointers: Any, mask: Any) -> None:
        """Note what an operation touches."""
        data = np.asarray(pointers.data).reshape(-1)
        chosen = data[np.broadcast_to(mask.data, np.shape(pointers.data)).reshape(-1) != 0]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        self._now[is_write].setdefault(size, []).append(np.unique(chosen.astype(np.int64)))

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Have launches noted."""
        builder = type(interpreter.interpreter_builder)
        load, store, run = (
            builder.create_masked_load,
            builder.create_masked_store,
            InterpretedFunction.run,
        )

        def noted_load(own: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            self.note(False, pointers, mask)
            return load(own, pointers, mask, *rest, **named)

        def noted_store(own: Any, pointers: Any, value: Any, mask: Any, policy: Any) -> Any:
            self.note(True, pointers, mask)
            return store(own, pointers, value, mask, policy)

        def noted_run(kernel: Any, *args: Any, **named: Any) -> None:
            self._now = {}, {}
            run(kernel, *args, **named)
            for touched, found in zip((self.read, self.written), self._now, strict=True):
                touched.append(by_storage(found, [*args, *named.values()]))

        builder.create_masked_load, builder.create_masked_store = noted_load, noted_store
        InterpretedFunction.run = noted_run
        try:
            yield
        finally:
            builder.create_masked_load, builder.create_masked_store = load, store
            InterpretedFunction.run = run


def by_storage(found: dict[int, Addresses], arguments: list[Any]) -> Counter[int]:
    """Return how many bytes of each storage are among addresses of numbers, by their size."""
    tensors = [x.base if isinstance(x, TensorDescriptor) else x for x in arguments]
    storages = {x.untyped_storage()._cdata: x for x in tensors if isinstance(x, Tensor)}
    touched = Counter[int]()
    for size, parts in found.items():
        addresses = np.unique(np.concatenate(parts))
        for key, tensor in storages.items():
            begin = tensor.untyped_storage().data_ptr()
            end = begin + tensor.untyped_storage().nbytes()
            touched[key] += size * int(((addresses >= begin) & (addresses < end)).sum())
    return touched
