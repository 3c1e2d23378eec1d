"""Adapters in the C++ core: packed while steps run, installed between them."""

from ctypes import CDLL, Structure, c_float, c_int32, c_void_p
from typing import Any

import numpy as np

from headrace.engine_proc.worker.adapters.low_rank import LowRank, LowRanks
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cpu_executor import FORMATS, CpuExecutor
from headrace.engine_proc.worker.execution.held_matrices import Place, place_of
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.native_core import load_core

EMBED, ADAPTED_EMBED = 0, 8  # slots outside of layers: of a tied head, of embeddings


class GivenFactors(Structure):
    """`GivenFactors` of csrc/cpu/low_rank.h."""

    _fields_ = (
        *((name, c_int32) for name in ("layer", "slot", "a_rows", "a_cols", "b_rows", "b_cols")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("a", "b", "gain")),
    )


class PackedAdapter:
    """An adapter as the core has it, which belongs to no model yet.

    Raises:
        MemoryError: it does not fit.
    """

    def __init__(self, executor: CpuExecutor, low_ranks: LowRanks, format: Format) -> None:
        self._core = declared_core()
        held = {name: laid_out(name, low_rank) for name, low_rank in low_ranks.items()}
        given = [given_factors(place_in(executor.spec, name), own) for name, own in held.items()]
        factors = (GivenFactors * len(given))(*given)
        index = FORMATS.index(format)
        self._handle = c_void_p(self._core.headrace_cpu_adapter_create(index, factors, len(given)))
        if not self._handle:
            raise MemoryError("there is no memory for the adapter")

    def __del__(self) -> None:
        if self._handle:
            self._core.headrace_cpu_adapter_destroy(self._handle)

    def install(self, executor: CpuExecutor, slot: int) -> None:
        """Give it to a model, in a slot; the one before is freed. It is used up."""
        handle, self._handle = self._handle, c_void_p()
        self._core.headrace_cpu_adapter_install(executor.model, slot, handle)


def place_in(spec: DecoderSpec, name: str) -> Place:
    """Return where the core has what an adapter adds to a weight."""
    if name == "embed":
        return Place(-1, ADAPTED_EMBED)
    return Place(-1, EMBED) if name == "head" and spec.tied_head else place_of(spec, name)


def laid_out(name: str, low_rank: LowRank) -> LowRank:
    """Return factors whose numbers lie as the core takes them, row after row in fp32."""
    a = low_rank.a.T if name == "embed" and low_rank.a is not None else low_rank.a
    a, b, gain = (
        None if numbers is None else np.ascontiguousarray(numbers, np.float32)
        for numbers in (a, low_rank.b, low_rank.gain)
    )
    assert b is not None
    return LowRank(a, b, low_rank.scale, gain)


def given_factors(place: Place, own: LowRank) -> GivenFactors:
    """Return what `laid_out` returns as the core takes it. The factors must outlive it."""
    a_shape = (0, 0) if own.a is None else own.a.shape
    pointers = (None if x is None else x.ctypes.data for x in (own.a, own.b, own.gain))
    return GivenFactors(place.layer, place.slot, *a_shape, *own.b.shape, own.scale, *pointers)


def declared_core() -> Any:
    """Return the core with the types of the functions used here."""
    core: CDLL = load_core()
    for name, result, arguments in (
        ("create", c_void_p, (c_int32, c_void_p, c_int32)),
        ("destroy", None, (c_void_p,)),
        ("install", None, (c_void_p, c_int32, c_void_p)),
    ):
        function = core[f"headrace_cpu_adapter_{name}"]
        function.restype, function.argtypes = result, arguments
        setattr(core, f"headrace_cpu_adapter_{name}", function)
    return core
