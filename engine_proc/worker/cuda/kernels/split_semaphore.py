"""A semaphore for programs that share a tile (split-K): the last one to store reduces all parts.

Parts are reduced in their order, so the result does not depend on which program is last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def new_turns(num_tiles: int, device: torch.device) -> Tensor:
    """Return the counters: zeros, except while a kernel runs."""
    return torch.zeros(num_tiles, dtype=torch.int32, device=device)


@triton.jit
def comes_last(turns: tl.tensor, tile: tl.tensor, num_sharing: tl.tensor) -> tl.tensor:
    """Whether all programs that share a tile have stored their parts. L1 caches may not have
    them."""
    tl.debug_barrier()  # the whole program has, before one of its threads says so
    is_last = tl.atomic_add(turns + tile, 1, sem="acq_rel") == num_sharing - 1
    tl.store(turns + tile, 0, mask=is_last)
    return is_last
