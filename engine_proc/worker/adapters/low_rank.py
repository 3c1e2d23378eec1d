"""What an adapter (LoRA) adds to a weight: factors of low rank."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.weights import Weight

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LowRank:
    """The factors for one weight W: a row x becomes gain * (W x + scale * b (a x))."""

    a: Weight | None  # [rank, columns of the weight]; None is the identity
    b: Weight  # [rows of the weight, rank]
    scale: float
    gain: Numbers | None = None  # [rows], of DoRA; None is 1

    @property
    def delta(self) -> Numbers:
        """What is added to the weight."""
        b: Numbers = np.float32(self.scale) * self.b.to_float32()
        return b if self.a is None else b @ self.a.to_float32()


LowRanks = Mapping[str, LowRank]  # by the weight's name, see `weights.py`
