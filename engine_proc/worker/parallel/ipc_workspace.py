"""A rank's workspace: memory of its own that all ranks have mapped, and where everything is in it.

0     flags, u64 [2 phases][64 blocks][16]   written by the others
16 K  Counters                               this rank's own, as the next
32 K  rows, u64 [65536][8]                   where all ranks have each input of a graph
      staging, two halves                    inputs that are copied
      sums                                   of this rank's part, in two-shot
"""

import struct
from dataclasses import dataclass

from headrace.engine_proc.collectives.control_page import ControlPage

MAX_RANKS = 8  # csrc/collectives/all_reduce.cuh has these, and the two structs
COUNTERS_AT = 16 << 10
ROWS_AT = 32 << 10
NUM_ROWS = 1 << 16  # 2 sums in each of 80 layers, in 400 graphs
ROW = struct.Struct(f"={MAX_RANKS}Q")
STAGING_AT = ROWS_AT + NUM_ROWS * ROW.size
GROUP = struct.Struct(f"={3 * MAX_RANKS + 6}Q")
COUNTERS = struct.Struct("=3I")
FIRST_EPOCH = 1  # flags not yet written are 0


@dataclass(frozen=True)
class Layout:
    """The sizes of the parts. `half_bytes` is the largest tensor."""

    half_bytes: int
    world: int

    @property
    def sums_at(self) -> int:
        """Offset of the sums."""
        return STAGING_AT + 2 * self.half_bytes

    @property
    def num_bytes(self) -> int:
        """Size of the workspace, bytes."""
        part = -(-self.half_bytes // (16 * self.world)) * 16
        return self.sums_at + part


def group_words(
    layout: Layout, rank: int, bases: list[int], page_address: int, limit_ns: int
) -> bytes:
    """Return the `Group` of a rank.

    Args:
        bases: where this rank has mapped the workspace of each, its own included.
        page_address: of the control page, for kernels.
        limit_ns: how long a kernel waits; 0 is for ever.
    """
    padding = [0] * (MAX_RANKS - layout.world)
    return GROUP.pack(
        *bases,
        *padding,
        *(base + STAGING_AT for base in bases),
        *padding,
        *(base + layout.sums_at for base in bases),
        *padding,
        bases[rank] + COUNTERS_AT,
        page_address,
        page_address + ControlPage.status_at(rank),
        layout.half_bytes,
        rank,
        limit_ns,
    )
