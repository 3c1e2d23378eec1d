"""The factors of an adapter as its file has them, by module."""

from dataclasses import dataclass

from headrace.engine_proc.worker.checkpoints.weights import StoredTensor
from headrace.errors import HeadraceError


class AdapterRefused(HeadraceError):
    """An adapter cannot be used; the text, fit for clients, names the file and the reason."""


@dataclass(frozen=True)
class Factors:
    """What an adapter has for one module, a linear layer with a weight [out, in]."""

    a: StoredTensor | None  # [rank, in]; None: `b` is a weight [out, in] in place of the base's
    b: StoredTensor  # [out, rank]
    scale: float
    magnitude: StoredTensor | None = None  # [out], of DoRA
