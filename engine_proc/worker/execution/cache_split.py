"""Splits the memory of the cache into KV pages and state slots. Pure."""

from typing import NamedTuple

from headrace.errors import ConfigError
from headrace.ipc.worker_messages import SLOTS_PER_SEQUENCE

STATE_SHARE = 8  # states have one part in so many, or what the running sequences need, ...
MOST_STATES = 2  # ... but no more than one part in so many


class CacheSplit(NamedTuple):
    """How many KV pages and state slots there are."""

    num_pages: int
    num_states: int


def split_alike(split: CacheSplit, page_bytes: int, state_bytes: int, num_bytes: int) -> CacheSplit:
    """Return what fits into other memory, with pages and states in the proportion of a split."""
    taken = split.num_pages * page_bytes + split.num_states * state_bytes
    return CacheSplit(*(num_bytes * count // taken for count in split))


def split_cache(
    cache_bytes: int,
    page_bytes: int,
    state_bytes: int,
    max_num_seqs: int,
    slots_each: int = SLOTS_PER_SEQUENCE,
) -> CacheSplit:
    """Return what fits into the cache.

    Args:
        state_bytes: of a slot; 0 in models without states.
        slots_each: that there should be for each sequence.

    Raises:
        ConfigError: there is no room for the states of one sequence.
    """
    if not state_bytes:
        return CacheSplit(cache_bytes // page_bytes, 0)
    most = cache_bytes // MOST_STATES // state_bytes
    if most < SLOTS_PER_SEQUENCE:
        least = MOST_STATES * SLOTS_PER_SEQUENCE * state_bytes
        raise ConfigError(
            f"--kv-cache-memory-bytes {cache_bytes} has no room for the states of one sequence: "
            f"half of it holds {most} of {state_bytes} bytes, not {SLOTS_PER_SEQUENCE}; "
            f"raise it to {least} or more"
        )
    wanted = max(slots_each * max_num_seqs, cache_bytes // STATE_SHARE // state_bytes)
    num_states = min(most, wanted)
    return CacheSplit((cache_bytes - num_states * state_bytes) // page_bytes, num_states)
