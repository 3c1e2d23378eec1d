"""Divides sequences among the steps that are in the stages of a pipeline at once. Pure.

Each step has other sequences than those in flight, but for chunks of one prompt. A sequence joins
the next step once its token is known.
"""

from headrace.engine_proc.scheduling.scheduler_limits import SchedulerLimits
from headrace.engine_proc.sequence.sequence import Sequence


def share_of_step(
    running: list[Sequence], num_waiting: int, num_open: int, limits: SchedulerLimits
) -> int:
    """Return how many sequences a step may have, so that the stages have about as many each.

    Args:
        num_open: steps in flight, fewer than there are stages.
    """
    if limits.num_stages == 1:
        return len(running) + num_waiting
    num_admitted = min(num_waiting, limits.max_num_seqs - len(running))
    num_ready = sum(sequence.num_pending > 0 for sequence in running) + num_admitted
    return -(-num_ready // (limits.num_stages - num_open))
