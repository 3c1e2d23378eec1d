"""Tells when to do what was not done for long, so that its costs stay known. Pure: no clock."""

TRIAL_STEPS = 128  # with drafts or without, after which the other is tried, at the latest
RETRY_STEPS = 16  # until the next attempt, where one came to no drafts
FIRST_STEPS = 4  # the first time; each time twice as many
TRIAL_SHARE = 0.01  # of a step, that may go to trials of the draft model


class Trials:
    """Counts steps with drafts and without.

    Attributes:
        has_drafts: whether the newest step had some.
        num_alike: the steps since the last one of the other kind.
        credit: what the next trial of the draft model may cost, in steps without drafts.
    """

    def __init__(self) -> None:
        self.has_drafts = False
        self.num_alike = 0
        self.credit = 0.0
        self._attempted_at = -RETRY_STEPS  # of `num_alike`

    def is_due(self, num_bare: int) -> bool:
        """Whether the other kind of step is to be tried.

        Args:
            num_bare: steps as large as the next one, without drafts, that were measured.
        """
        if not self.has_drafts:
            is_long_ago = self.num_alike - self._attempted_at >= RETRY_STEPS
            return is_long_ago and self.num_alike >= TRIAL_STEPS
        return self.num_alike >= min(TRIAL_STEPS, FIRST_STEPS << min(num_bare, TRIAL_STEPS))

    def attempt(self) -> None:
        """Note that the next step is to have drafts, if the texts or the credit allow some."""
        self._attempted_at = self.num_alike

    def count(self, *, has_drafts: bool) -> None:
        """Note a step of the model."""
        if has_drafts != self.has_drafts:
            self.num_alike, self._attempted_at = 0, -RETRY_STEPS
        self.num_alike += 1
        self.has_drafts = has_drafts
        self.credit += TRIAL_SHARE
