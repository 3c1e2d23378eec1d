"""A matrix whose numbers are of the type that it is multiplied in."""

from dataclasses import dataclass, field

from torch import Tensor

from headrace.engine_proc.worker.cuda.linear import ENOUGH_PROGRAMS, linear
from headrace.engine_proc.worker.cuda.turns import new_turns


@dataclass(frozen=True)
class DenseMatrix:
    """A `Matrix`."""

    weight: Tensor  # [columns, terms]
    bias: Tensor | None = None  # [columns]
    turns: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", new_turns(ENOUGH_PROGRAMS, self.weight.device))

    def apply(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`, [rows, columns]."""
        return linear(x, self.weight, self.bias, self.turns)
