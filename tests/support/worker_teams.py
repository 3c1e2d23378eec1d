"""Tensor-parallel workers as threads of a test."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from random_decoders import cpu

from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Floats, Logits
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.parallel.peers import Peers
from headrace.engine_proc.worker.parallel.shard import Shard, shards


class Team:
    """Workers that run one model together."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        num_ranks: int,
        read: Callable[[Shard], Weights] | None = None,
        **options: Any,
    ) -> None:
        fd = ShmAllReduce.create(num_ranks)
        self.groups = [ShmAllReduce(fd, rank, num_ranks) for rank in range(num_ranks)]
        os.close(fd)
        self.pool = ThreadPoolExecutor(num_ranks)
        shares = shards(spec, weights, num_ranks)
        options = {"threads": 1, **options}
        self.executors = [
            cpu(
                spec,
                weights if read is None else read(shares[group.rank]),
                peers=Peers(shares, group),
                **options,
            )
            for group in self.groups
        ]

    def run(self, step: Callable[[CpuExecutor], Floats]) -> Floats:
        """Return what all say, which is the same to the bit."""
        first, *others = self.pool.map(step, self.executors)
        for other in others:
            np.testing.assert_array_equal(other, first)
        return first

    def forward(self, step: Batch) -> Floats:
        """Return the logits of a step."""
        return self.run(lambda executor: executor.forward(step))

    def maxima(self, step: Batch) -> Floats:
        """Return the largest of each 64 logits of a step."""
        return self.run(lambda executor: executor.logits(step).maxima)

    def logits(self, step: Batch) -> Logits:
        """Return the logits of a step as executors do."""
        return Logits(self.forward(step))

    def close(self) -> None:
        """End the threads, and whatever they wait for."""
        self.groups[0].abort()
        self.pool.shutdown()
        self.executors.clear()
        for group in self.groups:
            group.close()
