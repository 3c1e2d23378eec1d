"""The workers that have the other shares of a model, as one of them sees them."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine_proc.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.worker.shard import Shard, shard_spec, shard_weights
from headrace.engine_proc.worker.spec import DecoderSpec
from headrace.engine_proc.worker.weights import Weights


@dataclass(frozen=True)
class Peers:
    """Who has which share, and where they meet."""

    shards: Sequence[Shard]  # by rank
    group: ShmAllReduce  # we are one of its ranks

    @property
    def shard(self) -> Shard:
        """Our own share."""
        return self.shards[self.group.rank]

    def share_of(self, spec: DecoderSpec, weights: Weights) -> tuple[DecoderSpec, Weights]:
        """Return our own share of a model."""
        return shard_spec(spec, self.shard), shard_weights(spec, weights, self.shard)
