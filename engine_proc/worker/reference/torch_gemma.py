"""What Gemma 3n and 4 have around their layers, in plain torch: the reference for the C++ core."""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.models.specs.decoder_spec import Activation, AltUpSpec, DecoderSpec

MIN_MAGNITUDE = 1e-5  # of the mean square of a projected residual


class TorchGemma:
    """The residuals and the embeddings per layer of one step; of other families, nothing.

    Args:
        x: the tokens' embeddings, [tokens, hidden].
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Tensor],
        x: Tensor,
        token_ids: npt.NDArray[np.int32],
    ) -> None:
        self.spec, self.weights = spec, weights
        self.inputs = self.per_layer_inputs(x, token_ids)
        self.residuals = [x]
        self.predicted = [x]
        if (altup := spec.altup) is not None:
            self.residuals += [
                like(F.linear(x, weights[f"altup.in.{i}"]), x) for i in range(1, altup.num_inputs)
            ]

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Normalize by the root mean square, in fp32."""
        weight = self.weights[name].float()
        return F.rms_norm(x.float(), weight.shape, weight, self.spec.norm_eps).to(x.dtype)

    def per_layer_inputs(self, x: Tensor, token_ids: npt.NDArray[np.int32]) -> Tensor | None:
        """Return the embeddings of all layers, [tokens, layers, size]."""
        if (own := self.spec.per_layer) is None:
            return None
        ids = torch.from_numpy(np.where(token_ids < own.vocab_size, token_ids, 0)).to(x.device)
        embeds = F.embedding(ids, self.weights["per_layer.embed"]) * own.size**0.5
        context = F.linear(x, self.weights["per_layer.proj"]) * x.shape[-1] ** -0.5
        context = self.norm("per_layer.proj_norm", context.view(len(x), -1, own.size))
        both: Tensor = (context + embeds.view_as(context)) * 2**-0.5
        return both

    def enter(self, index: int, x: Tensor) -> Tensor:
        """Return what a layer changes: the first of the predicted residuals."""
        if (altup := self.spec.altup) is None:
            return x
        modes = self.modes(index, self.residuals[0])
        count = altup.num_inputs
        factors = F.linear(modes, self.weights[f"layers.{index}.altup.predict"])
        factors = factors.view(len(x), count, count)
        self.predicted = [
            residual + sum(self.residuals[j] * factors[:, i, j, None] for j in range(count))
            for i, residual in enumerate(self.residuals)
        ]
        return self.predicted[0]

    def modes(self, index: int, x: Tensor) -> Tensor:
        """Return the weights that all factors follow from, [tokens, inputs]."""
        normed = self.norm(f"layers.{index}.altup.norm", x) / x.shape[-1]
        return torch.tanh(F.linear(normed, self.weights[f"layers.{index}.altup.router"]))

    def with_laurel(self, index: int, normed: Tensor, x: Tensor) -> Tensor:
        """Add the learned augmented residual of attention's input."""
        if self.spec.altup is None:
            return x
        name = f"layers.{index}.laurel"
        low = F.linear(normed, self.weights[f"{name}.left"])
        high = F.linear(low, self.weights[f"{name}.right"])
        return (x + normed + self.norm(f"{name}.norm", high)) / math.sqrt(2)

    def leave(self, index: int, x: Tensor) -> Tensor:
        """Return the residual behind a layer."""
        name = f"layers.{index}"
        if (altup := self.spec.altup) is not None:
            return self.corrected(index, altup, x)
        x = x if self.inputs is None else x + self.of_layer(index, x)
        return x * self.weights[f"{name}.scale"] if self.spec.layer_scale else x

    def of_layer(self, index: int, x: Tensor) -> Tensor:
        """Return what a layer adds of its embeddings."""
        assert self.inputs is not None
        name = f"layers.{index}.per_layer"
        gate = F.linear(x, self.weights[f"{name}.gate"])
        gate = F.gelu(gate, approximate=approximation(self.spec.activation))
        out = F.linear(gate * self.inputs[:, index], self.weights[f"{name}.out"])
        return self.norm(f"{name}.norm", out)

    def corrected(self, index: int, altup: AltUpSpec, x: Tensor) -> Tensor:
        """Spread a layer's change over all residuals."""
        name = f"layers.{index}.altup"
        factors = F.linear(self.modes(index, x), self.weights[f"{name}.correct"]) + 1
        change = x - self.predicted[0]
        self.residuals = [
            residual + change * factors[:, i, None] for i, residual in enumerate(self.predicted)
        ]
        first = self.residuals[0]
        seen = first * self.weights[f"{name}.scale"] if altup.scales_output else first
        added = self.of_layer(index, seen)
        self.residuals = [first, *(residual + added for residual in self.residuals[1:])]
        return first

    def end(self, x: Tensor) -> Tensor:
        """Return the mean of all residuals, the further ones projected back."""
        if self.spec.altup is None:
            return x
        rest = enumerate(self.residuals[1:], 1)
        back = [like(F.linear(own, self.weights[f"altup.out.{i}"]), x) for i, own in rest]
        return torch.stack([x, *back]).mean(0)


def like(x: Tensor, other: Tensor) -> Tensor:
    """Give rows the magnitude of others."""
    squares = x.square().mean(-1, keepdim=True).clamp(min=MIN_MAGNITUDE)
    return x * other.square().mean(-1, keepdim=True).sqrt() / squares.sqrt()


def approximation(activation: Activation) -> str:
    """Return torch's name of a GELU."""
    return "tanh" if activation == Activation.GELU_TANH else "none"
