"""Cuts a decoder into the stages of a pipeline.

A stage has adjacent layers. The first one has the embedding, the last one the final norm and the
head. A tied embedding is in both. What passes from one stage to the next is the residual, as it is
between layers, so no bit depends on the number of stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

from headrace.engine_proc.worker.checkpoints.weights import Weight, Weights
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.parallel.peers import Group, Peers
from headrace.engine_proc.worker.parallel.shard import Shard
from headrace.errors import ModelError


@dataclass(frozen=True)
class PipelineStage:
    """A stage's part of a decoder."""

    layers: range
    is_first: bool
    is_last: bool

    def spec_of(self, whole: DecoderSpec) -> DecoderSpec:
        """Return the stage as a decoder of its own."""
        return replace(
            whole,
            layers=whole.layers[self.layers.start : self.layers.stop],
            deepstack=whole.deepstack if self.is_first else 0,
            takes_hidden=not self.is_first,
            gives_hidden=not self.is_last,
        )

    def model_of(self, whole: DecoderModel) -> DecoderModel:
        """Return the stage's part of a model."""
        spec, weights = self.spec_of(whole.spec), self.weights_of(whole.spec, whole.weights)
        return replace(whole, spec=spec, weights=weights)

    def peers_of(self, whole: Peers[Group] | None) -> Peers[Group] | None:
        """Return the workers of the stage by their shares, where there are several."""
        if whole is None:
            return None
        return Peers([self.shard_of(shard) for shard in whole.shards], whole.group)

    def weights_of(self, whole: DecoderSpec, weights: Weights) -> dict[str, Weight]:
        """Return the stage's weights, as views of the whole model's. Nothing is read."""
        names = weight_shapes(self.spec_of(whole))
        return {name: weights[moved(name, self.layers.start)] for name in names}

    def shard_of(self, shard: Shard) -> Shard:
        """Return a tensor-parallel worker's shard of the whole model as one of the stage."""
        return replace(
            shard,
            experts=self._own(shard.experts),
            shared=self._own(shard.shared),
            channels=self._own(shard.channels),
            delta_heads=self._own(shard.delta_heads),
            mamba2_heads=self._own(shard.mamba2_heads),
            layer_kv_heads=self._own(shard.layer_kv_heads),
            layer_inner=self._own(shard.layer_inner),
        )

    def _own(self, ranges: Mapping[int, range]) -> dict[int, range]:
        first = self.layers.start
        return {i - first: ranges[i] for i in self.layers if i in ranges}


def moved(name: str, first: int) -> str:
    """Return a weight's name in the whole model, where the stage's layers begin with `first`."""
    if not name.startswith("layers."):
        return name
    _, index, local = name.split(".", 2)
    return f"layers.{int(index) + first}.{local}"


def stages(spec: DecoderSpec, num_stages: int) -> list[PipelineStage]:
    """Return the stages, each with about as many numbers of weights to multiply by.

    Raises:
        ModelError: the decoder cannot be cut into so many.
    """
    if why := why_not(spec, num_stages):
        raise ModelError(f"--pp {num_stages}: {why}")
    ends = cut_by_size(layer_sizes(spec), num_stages)
    return [
        PipelineStage(range(a, b), a == 0, b == len(spec.layers)) for a, b in pairwise([0, *ends])
    ]


def models_of(model: DecoderModel, num_stages: int) -> list[DecoderModel]:
    """Return the stages' parts of a model; of one stage the model itself.

    Raises:
        ModelError: the decoder cannot be cut into so many.
    """
    if num_stages == 1:
        return [model]
    return [stage.model_of(model) for stage in stages(model.spec, num_stages)]


def why_not(spec: DecoderSpec, num_stages: int) -> str:
    """Return why a decoder cannot be cut into so many stages; "" where it can."""
    if num_stages > len(spec.layers):
        return f"the model has {len(spec.layers)} layers, and a stage has one at least"
    if spec.encoder is not None:
        return "an encoder has no stages; leave it out"
    if spec.state_numbers:
        return "models with states have no stages; leave it out"
    if spec.per_layer is not None or spec.altup is not None or spec.num_mtp_layers:
        return "more than a hidden state passes between this model's layers; leave it out"
    if any(layer.keys_of is not None for layer in spec.layers):
        return "layers of this model read the keys of others; leave it out"
    return ""


def layer_sizes(spec: DecoderSpec) -> list[int]:
    """Return how many numbers each layer multiplies by; the head is one of the last's."""
    sizes = [0] * len(spec.layers)
    for name, shape in weight_shapes(spec).items():
        if name.startswith("layers."):
            sizes[int(name.split(".")[1])] += prod(shape)
    sizes[-1] += spec.vocab_size * spec.hidden_size  # the head
    return sizes


def cut_by_size(sizes: list[int], num_parts: int) -> list[int]:
    """Return where the parts end, of which each has one size at least."""
    sums = list(accumulate(sizes, initial=0))
    ends: list[int] = []
    for part in range(1, num_parts):
        first = ends[-1] + 1 if ends else 1
        fitting = range(first, len(sizes) - (num_parts - part) + 1)
        wanted = sums[-1] * part / num_parts
        ends.append(min(fitting, key=lambda end: abs(sums[end] - wanted)))
    return [*ends, len(sizes)]
