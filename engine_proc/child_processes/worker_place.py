"""The place of each worker among the stages of a model and the ranks of a stage."""

from dataclasses import dataclass

from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.shm.hidden_link import HiddenLink


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's place, and the descriptors that it shares with other workers."""

    index: int  # among all of the model
    stage: int
    rank: int  # among the workers of the stage,
    group_fd: int | None  # which meet there, if there are several
    before_fd: int | None  # of the link from the same rank of the stage before,
    after_fd: int | None  # and of that to the next one

    @property
    def fds(self) -> tuple[int, ...]:
        """All descriptors."""
        found = (self.group_fd, self.before_fd, self.after_fd)
        return tuple(fd for fd in found if fd is not None)


def make_places(num_stages: int, num_ranks: int) -> list[WorkerPlace]:
    """Return the places of all workers, stage after stage. Groups and links are new."""
    places: list[WorkerPlace] = []
    for stage in range(num_stages):
        group = ShmAllReduce.create(num_ranks) if num_ranks > 1 else None
        for rank in range(num_ranks):
            before = places[-num_ranks].after_fd if stage else None
            after = HiddenLink.create() if stage < num_stages - 1 else None
            places.append(WorkerPlace(len(places), stage, rank, group, before, after))
    return places
