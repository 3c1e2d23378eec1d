"""Adapters in the C++ core: packed while steps run, installed between them."""

from ctypes import CDLL, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.engine_proc.worker.adapters.adapter_opener import AdaptedModel, open_adapter
from headrace.engine_proc.worker.adapters.low_rank import LowRank, LowRanks
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.held_matrices import (
    FORMATS,
    OUTER_MATRICES,
    Place,
    place_of,
)
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.native_core import check_structs, load_core

# Slots outside of layers: of a tied head, of embeddings that an adapter changes.
EMBED, ADAPTED_EMBED = 0, len(OUTER_MATRICES)
NUMBER_TYPES = (Format.F32, Format.BF16, Format.F16)  # in the order of csrc/cpu


class NumberRows(Structure):
    """`NumberRows` of csrc/cpu/matrix.h."""

    _fields_ = (("type", c_int32), ("stride", c_int64), ("first", c_void_p))


class GivenFactors(Structure):
    """`GivenFactors` of csrc/cpu/low_rank.h."""

    _fields_ = (
        *((name, c_int32) for name in ("layer", "slot", "expert", "num_experts")),
        *((name, c_int32) for name in ("a_rows", "a_cols", "b_rows", "b_cols")),
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
        held = all_laid_out(executor.spec, low_ranks)
        given = [given_factors(place, own) for place, own in held]
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


@dataclass(frozen=True)
class CpuAdapters:
    """The adapters of an executor; see `AdapterSlots`."""

    executor: CpuExecutor
    model: AdaptedModel
    format: Format  # of factors in memory, F32 or BF16

    def pack(self, path: Path) -> PackedAdapter:
        """Read an adapter."""
        return PackedAdapter(self.executor, open_adapter(path, self.model), self.format)

    def install(self, slot: int, packed: PackedAdapter) -> None:
        """Put it into a slot."""
        packed.install(self.executor, slot)


def place_in(spec: DecoderSpec, name: str) -> Place:
    """Return where the core has what an adapter adds to a weight."""
    if name == "embed":
        return Place(-1, ADAPTED_EMBED)
    return Place(-1, EMBED) if name == "head" and spec.tied_head else place_of(spec, name)


class FactorsPlace(NamedTuple):
    """Where the core has factors; experts are counted among the local ones."""

    layer: int
    slot: int
    expert: int = 0
    num_experts: int = 1


def factors_place(spec: DecoderSpec, name: str) -> FactorsPlace:
    """Return where the core has what an adapter adds to a weight."""
    place = place_in(spec, name)
    if not place.is_expert:
        return FactorsPlace(place.layer, place.slot)
    mixture = spec.layers[place.layer].mixture
    assert mixture is not None
    experts = mixture.own_experts
    expert = int(name.split(".")[3]) - experts.start
    return FactorsPlace(place.layer, place.slot, expert, len(experts))


def all_laid_out(spec: DecoderSpec, low_ranks: LowRanks) -> list[tuple[FactorsPlace, LowRank]]:
    """Return all factors as the core reads them, in the order of layers and slots."""
    groups: dict[tuple[int, int], list[tuple[FactorsPlace, LowRank]]] = {}
    for name, low_rank in low_ranks.items():
        place = factors_place(spec, name)
        groups.setdefault((place.layer, place.slot), []).append((place, laid_out(name, low_rank)))
    return [factors for _, group in sorted(groups.items()) for factors in alike(group)]


def alike(experts: list[tuple[FactorsPlace, LowRank]]) -> list[tuple[FactorsPlace, LowRank]]:
    """Return the factors of a matrix with one rank and one scale."""
    rank = max(own.b.shape[1] for _, own in experts)
    scale = max((own.scale for _, own in experts), key=abs)
    return [
        (place, own if (own.b.shape[1], own.scale) == (rank, scale) else rescaled(own, rank, scale))
        for place, own in experts
    ]


def rescaled(own: LowRank, rank: int, scale: float) -> LowRank:
    """Return the same factors with a higher rank, and with another scale."""
    assert own.a is not None
    more = rank - own.b.shape[1]
    a = np.pad(own.a.to_float32(), ((0, more), (0, 0)))
    b = np.pad(own.b.to_float32(), ((0, 0), (0, more))) * np.float32(own.scale / scale)
    return LowRank(StoredTensor.of(a), StoredTensor.of(b), scale, own.gain)


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


def given_factors(place: FactorsPlace, own: LowRank) -> GivenFactors:
    """Return what `laid_out` returns as the core takes it. The factors must outlive it."""
    a_shape = (0, 0) if own.a is None else own.a.shape
    a = NumberRows() if own.a is None else number_rows(own.a.stored())
    gain = None if own.gain is None else own.gain.ctypes.data
    b = number_rows(own.b.stored())
    return GivenFactors(*place, *a_shape, *own.b.shape, own.scale, a, b, gain)


def number_rows(factors: StoredTensor) -> NumberRows:
    """Return where factors lie."""
    lines = factors.lines
    return NumberRows(NUMBER_TYPES.index(factors.format), lines.strides[0], lines.ctypes.data)


def declared_core() -> Any:
    """Return the core with the types of the functions used here."""
    core: CDLL = load_core()
    check_structs(core, "headrace_cpu_adapter_struct_bytes", (GivenFactors,))
    for name, result, arguments in (
        ("create", c_void_p, (c_int32, c_void_p, c_int32)),
        ("destroy", None, (c_void_p,)),
        ("install", None, (c_void_p, c_int32, c_void_p)),
    ):
        function = core[f"headrace_cpu_adapter_{name}"]
        function.restype, function.argtypes = result, arguments
        setattr(core, f"headrace_cpu_adapter_{name}", function)
    return core
