"""Which experts a step reads, counted by the reference in torch."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, MixtureSpec
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor
from headrace.engine_proc.worker.reference.torch_mixture import choose_experts


class Decoded:
    """A weight in fp32, which weights of the same numbers share."""

    def __init__(self, numbers: np.ndarray[Any, Any]) -> None:
        self._numbers = numbers

    def to_float32(self) -> np.ndarray[Any, Any]:
        """Return the numbers, not a copy."""
        return self._numbers


class ExpertCounter(TorchExecutor):
    """Runs steps in fp32 and counts the experts of each layer that some token chooses."""

    def __init__(self, spec: DecoderSpec, weights: Weights, *, num_pages: int, page_tokens: int):
        stored = {id(weight): weight for weight in weights.values()}
        decoded = {key: Decoded(weight.to_float32()) for key, weight in stored.items()}
        shared: Any = {name: decoded[id(weight)] for name, weight in weights.items()}
        super().__init__(spec, shared, num_pages=num_pages, page_tokens=page_tokens)
        self._chosen: list[int] = []

    def mixture(
        self, name: str, mixture: MixtureSpec, x: Tensor, routed: Tensor | None = None
    ) -> Tensor:
        """See `TorchExecutor`."""
        logits = self.linear(f"{name}.router", x if routed is None else routed).float()
        bias = self.weights.get(f"{name}.router.selection_bias")
        experts, _ = choose_experts(mixture, logits, bias)
        self._chosen.append(len(set(experts.flatten().tolist())))
        return super().mixture(name, mixture, x, routed)

    def chosen(self, batches: Iterable[Batch]) -> list[list[int]]:
        """Run steps in order; return how many experts each reads, by layer."""
        counts = []
        for batch in batches:
            self._chosen = []
            self.embed(batch)
            counts.append(self._chosen)
        return counts
