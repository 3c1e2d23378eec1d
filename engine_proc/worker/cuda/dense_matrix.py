"""A matrix whose numbers are of the type that it is multiplied in."""

from dataclasses import dataclass

from torch import Tensor

from headrace.engine_proc.worker.cuda.linear import linear


@dataclass(frozen=True)
class DenseMatrix:
    """A `Matrix`."""

    weight: Tensor  # [columns, terms]
    bias: Tensor | None = None  # [columns]

    def apply(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`, [rows, columns]."""
        return linear(x, self.weight, self.bias)
