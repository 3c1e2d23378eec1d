"""A page that the engine, its workers and their GPU kernels share.

Its abort word ends all waits. The process that sees a worker die, or that raises, sets it. Kernels
write each rank's failure.

    0            abort, u32: an Outcome
    128 (1 + r)  of rank r: outcome, peer, phase, block, epoch, u32 each, written by its kernels
"""

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass

from headrace.engine_proc.collectives.collectives import CollectiveFailed, CollectiveOutcome

PAGE_BYTES = 4096  # what can be registered with a GPU
LINE_BYTES = 128
MAX_RANKS = PAGE_BYTES // LINE_BYTES - 1
WORD = struct.Struct("=I")
STATUS = struct.Struct("=5I")


@dataclass(frozen=True)
class Status:
    """A kernel's timeout: it waited for `peer` in a barrier of call number `epoch`."""

    outcome: CollectiveOutcome
    peer: int
    phase: int
    block: int
    epoch: int


class ControlPage:
    """One end of the page; all are alike.

    Args:
        fd: made by `create`.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls) -> "ControlPage":
        """Make a page in which nothing has failed."""
        fd = os.memfd_create("headrace-control", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        return cls(fd)

    @staticmethod
    def status_at(rank: int) -> int:
        """Return where in the page a rank's status is."""
        assert 0 <= rank < MAX_RANKS
        return LINE_BYTES * (1 + rank)

    def abort(self, outcome: CollectiveOutcome = CollectiveOutcome.ABORTED) -> None:
        """End all waits, for good. The first call sets the reason."""
        if self.aborted is CollectiveOutcome.OK:
            WORD.pack_into(self._map, 0, outcome)

    @property
    def aborted(self) -> CollectiveOutcome:
        """Reason why waits end; OK while they do not."""
        return CollectiveOutcome(WORD.unpack_from(self._map)[0])

    def status(self, rank: int) -> Status:
        """Return how a rank's kernels are."""
        outcome, *rest = STATUS.unpack_from(self._map, self.status_at(rank))
        return Status(CollectiveOutcome(outcome), *rest)

    def check(self, rank: int) -> None:
        """Raise `CollectiveFailed` if a rank's kernels gave up or the group was aborted."""
        status, aborted = self.status(rank), self.aborted
        if status.outcome is CollectiveOutcome.OK and aborted is CollectiveOutcome.OK:
            return
        if status.outcome is CollectiveOutcome.OK:
            raise CollectiveFailed(aborted, None, "the workers were told to stop")
        where = f"in call {status.epoch}, barrier {status.phase}, block {status.block}"
        texts = {
            CollectiveOutcome.ABORTED: "the workers were told to stop while "
            f"rank {rank} waited for ",
            CollectiveOutcome.MISMATCH: f"rank {rank} called another all-reduce than ",
            CollectiveOutcome.LATE: f"rank {rank} waited too long for ",
        }
        text = f"{texts[status.outcome]}rank {status.peer}, {where}"
        raise CollectiveFailed(status.outcome, status.peer, text)

    def clear(self) -> None:
        """Clear the abort word and all failures. No process or kernel may be using the page."""
        self._map[:] = bytes(PAGE_BYTES)
