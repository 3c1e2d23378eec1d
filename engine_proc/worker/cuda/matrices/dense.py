"""A matrix whose numbers are of the type that it is multiplied in."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.gated_activation import act_mul
from headrace.engine_proc.worker.cuda.kernels.gated_linear import can_be_gated, gated_linear
from headrace.engine_proc.worker.cuda.kernels.linear import ENOUGH_PROGRAMS, linear
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import new_turns
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation


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

    def apply_wide(self, x: Tensor) -> Tensor:
        """Do as `apply`, in fp32."""
        return linear(x, self.weight, self.bias, self.turns, torch.float32)

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Return `act(gate) * up`, [rows, columns / 2], where gates are the first columns."""
        if can_be_gated(self.weight):
            return gated_linear(x, self.weight, self.bias, activation)
        return act_mul(self.apply(x), activation)
