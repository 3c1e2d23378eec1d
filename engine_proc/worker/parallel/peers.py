"""The workers that have the other shares of a model, as one of them sees them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.engine_proc.collectives.collectives import Collectives
from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.parallel.shard import Shard, shard_spec, shard_weights

Group = TypeVar("Group", bound=Collectives[Any])


@dataclass(frozen=True)
class Peers(Generic[Group]):
    """The shard of each rank, and the group of their collectives."""

    shards: Sequence[Shard]  # by rank
    group: Group  # we are one of its ranks

    @property
    def shard(self) -> Shard:
        """Our own share."""
        return self.shards[self.group.rank]

    def share_of(self, spec: DecoderSpec, weights: Weights) -> tuple[DecoderSpec, Weights]:
        """Return our own share of a model."""
        return shard_spec(spec, self.shard), shard_weights(spec, weights, self.shard)
