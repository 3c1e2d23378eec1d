"""What is around the layers of Gemma 3n and 4, over one step.

Tokens have embeddings for each layer. There may be several residuals, a learned augmented residual,
and a factor of each layer. All workers compute all of it.
"""

import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import Scaling
from headrace.engine_proc.worker.cuda.matrices.matrices import DeviceWeights
from headrace.engine_proc.worker.cuda.residuals import altup
from headrace.engine_proc.worker.cuda.residuals.altup import ModeRouter
from headrace.engine_proc.worker.cuda.residuals.layer_inputs import layer_inputs, meet_inputs
from headrace.engine_proc.worker.cuda.residuals.normed_sum import Normed, normed_sum
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec

ROOT_HALF = 0.5**0.5


def has_more(spec: DecoderSpec) -> bool:
    """Whether a decoder has any of this."""
    return spec.per_layer is not None or spec.altup is not None or spec.layer_scale


class AroundLayers:
    """The residuals and embeddings of one step.

    Args:
        scaling: of all norms.
        x: the tokens' embeddings, [tokens, hidden].
        embeds: those for all layers, [tokens, layers * size]; None where there are none.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DeviceWeights,
        scaling: Scaling,
        x: Tensor,
        embeds: Tensor | None,
    ) -> None:
        self._spec, self._scaling = spec, scaling
        self._tensors, self._matrices = weights.tensors, weights.matrices
        self._inputs: Tensor | None = None
        if embeds is not None:
            context = self._matrices["per_layer.proj"].apply(x)
            weight = self._tensors["per_layer.proj_norm"]
            eps = spec.norm_eps * spec.hidden_size  # as if divided by the root of the width before
            self._inputs = layer_inputs(context, embeds, weight, eps)
        self._residuals = self._predicted = x
        if spec.altup is not None:
            self._residuals = altup.begin(x, self._matrices["altup.in"].apply(x))

    def enter(self, index: int, x: Tensor) -> Tensor:
        """Return what a layer changes, which may be `x`."""
        if self._spec.altup is None:
            return x
        weights = self._tensors[f"layers.{index}.altup.predict"]
        self._predicted, x = altup.predict(self._residuals, self._router(index), weights)
        return x

    def add_attended(self, index: int, attended: Tensor, normed: Tensor, x: Tensor) -> None:
        """Add what attention gives to x, in place.

        Args:
            normed: what attention has read.
        """
        name = f"layers.{index}"
        own = attended, self._tensors[f"{name}.attn_post_norm"]
        if self._spec.altup is None:
            self._add(own, x)
            return
        low = self._matrices[f"{name}.laurel.left"].apply(normed)
        laurel = self._matrices[f"{name}.laurel.right"].apply(low)
        other = laurel, self._tensors[f"{name}.laurel.norm"]
        normed_sum(
            own,
            other,
            scaling=self._scaling,
            eps=self._spec.norm_eps,
            residual=x,
            plain=normed,
            multiplier=ROOT_HALF,
        )

    def leave(self, index: int, out: Tensor, x: Tensor) -> None:
        """Add to x, in place, what an MLP gives, and what follows it."""
        name = f"layers.{index}"
        own = out, self._tensors[f"{name}.mlp_post_norm"]
        factor = self._tensors[f"{name}.scale"] if self._spec.layer_scale else None
        self._add(own, x, factor if self._inputs is None else None)
        if self._inputs is None:
            return
        seen = x
        if (spec := self._spec.altup) is not None:
            weights = self._tensors[f"{name}.altup.correct"]
            scale = self._tensors[f"{name}.altup.scale"] if spec.scales_output else None
            self._residuals, seen = altup.correct(
                self._predicted, x, self._router(index), weights, scale
            )
        gates = self._matrices[f"{name}.per_layer.gate"].apply(seen)
        met = meet_inputs(gates, self._inputs, index, self._spec.activation)
        more = self._matrices[f"{name}.per_layer.out"].apply(met)
        weight = self._tensors[f"{name}.per_layer.norm"]
        if spec is None:
            self._add((more, weight), x, factor)
        else:
            altup.spread(self._residuals, more, weight, self._spec.norm_eps)

    def end(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return what the last norm reads of some tokens, [rows, hidden]."""
        if self._spec.altup is None:
            return x.index_select(0, rows)
        own = self._residuals.index_select(0, rows).transpose(0, 1).contiguous()
        back = [
            self._matrices[f"altup.out.{i}"].apply(own[i])
            for i in range(1, self._spec.altup.num_inputs)
        ]
        return altup.join(own[0], torch.stack(back))

    def _router(self, index: int) -> ModeRouter:
        name = f"layers.{index}.altup"
        tensors = self._tensors
        return ModeRouter(tensors[f"{name}.norm"], tensors[f"{name}.router"], self._spec.norm_eps)

    def _add(self, own: Normed, x: Tensor, factor: Tensor | None = None) -> None:
        """Add norms of rows to x, in place, and multiply the sum."""
        eps = self._spec.norm_eps
        normed_sum(own, scaling=self._scaling, eps=eps, residual=x, factor=factor)
