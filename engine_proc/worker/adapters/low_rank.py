"""What an adapter (LoRA) adds to a weight: factors of low rank."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LowRank:
    """The factors for one weight W: a row x becomes gain * (W x + scale * b (a x))."""

    a: Numbers  # [rank, columns of the weight]
    b: Numbers  # [rows of the weight, rank]
    scale: float
    gain: Numbers | None = None  # [rows], of DoRA; None is 1

    @property
    def rank(self) -> int:
        """Columns of `b`, and rows of `a`."""
        return len(self.a)


LowRanks = Mapping[str, LowRank]  # by the weight's name, see `weights.py`
