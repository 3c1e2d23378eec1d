"""Where weights lie in their files, so that they are read in one sweep."""

from collections.abc import Iterable

from headrace.engine_proc.worker.checkpoints.mapped_file import Extent, extent_of
from headrace.engine_proc.worker.checkpoints.weights import StoredTensor, Weight, Weights
from headrace.system.machine import memory_limit


def extent_of_weight(weight: Weight) -> Extent | None:
    """Return where a file has a weight; None is one that is made of several tensors, or of none."""
    return extent_of(weight.data) if isinstance(weight, StoredTensor) else None


def file_order(weights: Weights, names: Iterable[str]) -> list[str]:
    """Sort weights as files have them: disks read what is adjacent faster."""

    def place(name: str) -> tuple[str, int]:
        extent = extent_of_weight(weights[name])
        return ("", 0) if extent is None else (str(extent.file.path), extent.begin)

    return sorted(names, key=place)


def fits_twice(extents: Iterable[Extent | None]) -> bool:
    """Return whether memory has room for files and for what is made of them."""
    return 2 * sum(extent.end - extent.begin for extent in extents if extent) <= memory_limit()
