"""The factors of an adapter as its file has them, by the tensor that they change."""

import math
from dataclasses import dataclass

from headrace.engine_proc.worker.checkpoints.weights import StoredTensor, Weight
from headrace.errors import HeadraceError


class AdapterRefused(HeadraceError):
    """An adapter cannot be used; the text, fit for clients, names the file and the reason."""


@dataclass(frozen=True)
class Factors:
    """What an adapter has for one linear layer with a weight [out, in]."""

    a: Weight | None  # [rank, in]; None: `b` is a weight [out, in] in place of the base's
    b: Weight  # [out, rank]
    alpha: float = 1.0
    is_rank_stabilized: bool = False
    magnitude: StoredTensor | None = None  # [out], of DoRA

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        rank = 0 if self.a is None or not self.a.shape else self.a.shape[0]
        return self.alpha / max(math.sqrt(rank) if self.is_rank_stabilized else rank, 1)
