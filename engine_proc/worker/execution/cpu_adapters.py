"""Adapters in the C++ core: packed while steps run, installed between them."""

from ctypes import CDLL, Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np

from headrace.engine_proc.worker.adapters.low_rank import LowRank, LowRanks
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight
from headrace.engine_proc.worker.execution.cpu_executor import FORMATS, CpuExecutor
from headrace.engine_proc.worker.execution.held_matrices import OUTER_MATRICES, Place, place_of
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.native_core import load_core

EMBED, ADAPTED_EMBED = (
    0,
    len(OUTER_MATRICES),
)  # slots outside of layers: of a tied head, of embeddings
NUMBER_TYPES = (Format.F32, Format.BF16, Format.F16)  # in the order of csrc/cpu


class NumberRows(Structure):
    """`NumberRows` of csrc/cpu/matrix.h."""

    _fields_ = (("type", c_int32), ("stride", c_int64), ("first", c_void_p))


class GivenFactors(Structure):
    """`GivenFactors` of csrc/cpu/low_rank.h."""

    _fields_ = (
        *((name, c_int32) for name in ("layer", "slot", "a_rows", "a_cols", "b_rows", "b_cols")),
        ("scale", c_float),
        ("a", NumberRows),
        ("b", NumberRows),
        ("gain", c_void_p),
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
    """Return factors as the core reads them."""
    a, gain = low_rank.a, low_rank.gain
    if a is not None:
        a = StoredTensor.of(a.to_float32().T) if name == "embed" else readable(a)
    gain = None if gain is None else np.ascontiguousarray(gain, np.float32)
    return LowRank(a, readable(low_rank.b), low_rank.scale, gain)


def readable(factors: Weight) -> StoredTensor:
    """Return factors in a type of numbers that the core reads."""
    stored = factors.stored()
    return stored if stored.format in NUMBER_TYPES else StoredTensor.of(stored.to_float32())


def given_factors(place: Place, own: LowRank) -> GivenFactors:
    """Return what `laid_out` returns as the core takes it. The factors must outlive it."""
    a_shape = (0, 0) if own.a is None else own.a.shape
    a = NumberRows() if own.a is None else number_rows(own.a.stored())
    gain = None if own.gain is None else own.gain.ctypes.data
    b = number_rows(own.b.stored())
    return GivenFactors(place.layer, place.slot, *a_shape, *own.b.shape, own.scale, a, b, gain)


def number_rows(factors: StoredTensor) -> NumberRows:
    """Return where factors lie."""
    lines = factors.lines
    return NumberRows(NUMBER_TYPES.index(factors.format), lines.strides[0], lines.ctypes.data)


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
