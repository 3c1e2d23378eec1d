"""The interface of collective operations between workers, and their failures."""

from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Protocol, TypeVar

from headrace.errors import HeadraceError
from headrace.exit_status import ExitStatus

T = TypeVar("T")


class CollectiveOutcome(IntEnum):
    """The outcome of a collective.

    `Outcome` of csrc/collectives/shm_group.h, `Code` of csrc/collectives/all_reduce.cuh.
    """

    OK = 0
    ABORTED = 1
    PEER_DIED = 2
    MISMATCH = 3
    LATE = 4


class CollectiveFailed(HeadraceError):
    """A collective ended without a result. All later ones of the group fail, too.

    `rank` is the one that died, timed out or called another collective; None if there is none.
    """

    exit_status = ExitStatus.PEER_LOST

    def __init__(self, outcome: CollectiveOutcome, rank: int | None, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome
        self.rank = rank


class Collectives(Protocol[T]):
    """One rank of a group, wherever its arrays are. All ranks call the same in the same order."""

    rank: int

    def all_reduce(self, x: T) -> T:
        """Return the sum of `x` over the ranks; it may be in `x` itself."""

    def all_gather(self, x: T, out: T) -> None:
        """Write the `x` of every rank to `out`, [num_ranks, *x.shape]."""

    def broadcast(self, x: T, root: int = 0) -> None:
        """Replace `x` by that of rank `root`."""

    def capture(self) -> AbstractContextManager[None]:
        """Whatever is around the capture of graphs."""

    def abort(self) -> None:
        """End all waits, in every process."""

    def check(self) -> None:
        """Raise `CollectiveFailed` if the group has come to its end."""

    def close(self) -> None:
        """Leave the group."""
