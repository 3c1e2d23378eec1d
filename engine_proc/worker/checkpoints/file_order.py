"""Where weights lie in their files, so that they are read in one sweep."""

from collections.abc import Iterable

from headrace.engine_proc.worker.checkpoints.mapped_file import Extent, extent_of
from headrace.engine_proc.worker.checkpoints.weights import StoredTensor, Weight, Weights
from headrace.system.machine import memory_limit


def in_file_order(weights: Weights, names: Iterable[str]) -> dict[str, Extent | None]:
    """Return where files have weights, in the order of the files.

    Disks read what is adjacent faster. What is not one piece of a file comes first.
    """

    def place(found: tuple[str, Extent | None]) -> tuple[str, int]:
        extent = found[1]
        return ("", 0) if extent is None else (str(extent.file.path), extent.begin)

    return dict(sorted(((name, extent_of_weight(weights[name])) for name in names), key=place))


def extent_of_weight(weight: Weight) -> Extent | None:
    """Return where a file has a weight; None is one that is made of several tensors, or of none."""
    return extent_of(weight.data) if isinstance(weight, StoredTensor) else None


def fits_twice(extents: Iterable[Extent | None]) -> bool:
    """Return whether memory has room for files and for what is made of them."""
    return 2 * sum(extent.end - extent.begin for extent in extents if extent) <= memory_limit()
