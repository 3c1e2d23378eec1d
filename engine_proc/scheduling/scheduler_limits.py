"""What bounds the steps of a scheduler."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Limits of a step, of the running set and of the waiting queue."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued: int = 1 << 30
    num_stages: int = 1  # of a pipeline: so many steps, of different sequences, are in flight
    whole_prompts: bool = False  # no chunks, no prefixes; a step must hold the longest prompt
