"""A matrix of every expert of a mixture."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headrace.engine_proc.worker.cuda.mixtures.expert_gate import ExpertGate
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import (
    expert_linear,
    gated_expert_linear,
)
from headrace.engine_proc.worker.cuda.mixtures.expert_tiles import ExpertTiles


class Experts(Protocol):
    """Matrices that rows are multiplied with, each with that of its expert."""

    def apply(self, x: Tensor, tiles: ExpertTiles) -> Tensor:
        """Return `x @ weight.T + bias`, [pairs, terms] -> [pairs, columns]."""
        ...

    def apply_gated(self, x: Tensor, tiles: ExpertTiles, gate: ExpertGate) -> Tensor:
        """Return the gate of `x @ weight.T + bias`, [tokens, terms] -> [pairs, columns / 2]."""
        ...


@dataclass(frozen=True)
class DenseExperts:
    """`Experts`, of the type that they are multiplied in."""

    weight: Tensor  # [experts, columns, terms]
    bias: Tensor | None = None  # [experts, columns]

    def apply(self, x: Tensor, tiles: ExpertTiles) -> Tensor:
        """Return `x @ weight.T + bias`, [pairs, terms] -> [pairs, columns]."""
        return expert_linear(x, self.weight, self.bias, tiles)

    def apply_gated(self, x: Tensor, tiles: ExpertTiles, gate: ExpertGate) -> Tensor:
        """Return the gate of `x @ weight.T + bias`, [tokens, terms] -> [pairs, columns / 2]."""
        return gated_expert_linear(x, self.weight, self.bias, tiles, gate)
