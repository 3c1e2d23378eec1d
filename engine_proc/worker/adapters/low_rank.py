"""What an adapter (LoRA) adds to a weight: factors of low rank."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LowRank:
    """The factors for one weight W: a row x becomes gain * (W x + scale * b (a x))."""

    a: Numbers | None  # [rank, columns of the weight]; None is the identity
    b: Numbers  # [rows of the weight, rank]
    scale: float
    gain: Numbers | None = None  # [rows], of DoRA; None is 1

    @property
    def delta(self) -> Numbers:
        """What is added to the weight."""
        b: Numbers = np.float32(self.scale) * self.b
        return b if self.a is None else b @ self.a


LowRanks = Mapping[str, LowRank]  # by the weight's name, see `weights.py`
