"""Counters of the scheduler."""

from dataclasses import dataclass, field

from headrace.config.config import MAX_DRAFTS


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start of the scheduler."""

    steps: int = 0
    steps_ahead: int = 0  # those that were chosen while another was being computed
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache, ...
    prefix_hits: int = 0  # ... and those found
    drafts: int = 0  # tokens guessed, ...
    accepted_drafts: int = 0  # ... and those right
    draft_rounds: int = 0  # steps of sequences with guesses
    right_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)  # by place of the guess

    def check_drafts(self, num_drafts: int, num_right: int) -> None:
        """Count the drafts of a sequence that a step has checked."""
        self.drafts += num_drafts
        self.accepted_drafts += num_right
        self.draft_rounds += 1
        for place in range(num_right):
            self.right_at[place] += 1
