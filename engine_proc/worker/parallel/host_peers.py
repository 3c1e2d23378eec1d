"""The other workers of a model, through memory of the host: how those on GPUs find each other."""

import numpy as np

from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce


class HostPeers:
    """A `joint_steps.StepPeers`."""

    def __init__(self, group: ShmAllReduce) -> None:
        self.rank, self.world = group.rank, group.num_ranks
        self._group = group

    def gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gives, by rank. All call it; lengths may differ."""
        lengths = self.gather_number(len(data))
        own = np.zeros(max(1, *lengths), np.uint8)
        own[: len(data)] = np.frombuffer(data, np.uint8)
        theirs = np.empty((self.world, len(own)), np.uint8)
        self._group.all_gather(own, theirs)
        return [row[:length].tobytes() for row, length in zip(theirs, lengths, strict=True)]

    def gather_number(self, number: int) -> list[int]:
        """Return the number of every rank."""
        numbers = np.empty(self.world, np.int64)
        self._group.all_gather(np.array([number], np.int64), numbers)
        return [int(each) for each in numbers]
