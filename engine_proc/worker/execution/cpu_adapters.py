"""Adapters in the C++ core: packed while steps run, installed between them."""

from ctypes import CDLL, c_float, c_int32, c_void_p
from typing import Any

import numpy as np

from headrace.engine_proc.worker.adapters.low_rank import LowRank, LowRanks
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cpu_executor import FORMATS, CpuExecutor
from headrace.engine_proc.worker.execution.held_matrices import Place, place_of
from headrace.native_core import load_core

EMBED, HEAD = 0, 1  # slots outside of layers


class PackedAdapter:
    """An adapter as the core has it, which belongs to no model yet.

    Raises:
        MemoryError: it does not fit.
    """

    def __init__(self, executor: CpuExecutor, low_ranks: LowRanks, format: Format) -> None:
        self._core = declared_core()
        self._handle = c_void_p(self._core.headrace_cpu_adapter_create())
        for name, low_rank in low_ranks.items():
            place = place_of(executor.spec, name)
            if name == "head" and executor.spec.tied_head:
                place = Place(-1, EMBED)
            if not self._handle or not self._add(place, low_rank, format):
                raise MemoryError("there is no memory for the adapter")

    def __del__(self) -> None:
        if self._handle:
            self._core.headrace_cpu_adapter_destroy(self._handle)

    def _add(self, place: Place, low_rank: LowRank, format: Format) -> bool:
        a, b = (np.ascontiguousarray(x, np.float32) for x in (low_rank.a, low_rank.b))
        gain = None
        if low_rank.gain is not None:
            gain = np.ascontiguousarray(low_rank.gain, np.float32)
        added = self._core.headrace_cpu_adapter_add(
            self._handle,
            place.layer,
            place.slot,
            FORMATS.index(format),
            low_rank.rank,
            len(b),
            a.shape[1],
            a.ctypes.data,
            b.ctypes.data,
            low_rank.scale,
            None if gain is None else gain.ctypes.data,
        )
        return bool(added)

    def install(self, executor: CpuExecutor, slot: int) -> None:
        """Give it to a model, in a slot; the one before is freed. It is used up."""
        handle, self._handle = self._handle, c_void_p()
        self._core.headrace_cpu_adapter_install(executor.model, slot, handle)


def declared_core() -> Any:
    """Return the core with the types of the functions used here."""
    core: CDLL = load_core()
    for name, result, arguments in (
        ("create", c_void_p, ()),
        ("destroy", None, (c_void_p,)),
        (
            "add",
            c_int32,
            (
                c_void_p, *(c_int32,) * 6, c_void_p, c_void_p, c_float, c_void_p,
            ),
        ),
        ("install", None, (c_void_p, c_int32, c_void_p)),
    ):  # fmt: skip
        function = core[f"headrace_cpu_adapter_{name}"]
        function.restype, function.argtypes = result, arguments
        setattr(core, f"headrace_cpu_adapter_{name}", function)
    return core
