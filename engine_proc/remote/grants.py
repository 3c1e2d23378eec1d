"""When a remote engine is granted more time, and when it is given up. Pure.

Once the last grant has run out, the gateway sends nothing and has the engine drop what it has.
So the sequences of an engine that cannot be heard go on elsewhere. A step in progress, or an engine
that stands still, may compute for longer. Its outputs go to a session that has ended.
"""

from collections import deque

from headrace.ipc.remote_messages import LEASE_S

GRANT_S = 0.2  # between grants
SILENCE_S = 1.0  # of an engine
ENDING_S = 0.4  # for its last step, after a grant has run out
NUM_SAMPLES = 50  # of clocks: those of ten seconds


class Grants:
    """The grants of a session. Times are of one clock, in seconds.

    Args:
        silence_s: since the last grant with an answer, after which there are no more.

    Attributes:
        is_lost: there are no more.
    """

    def __init__(self, now: float, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._granted_at = now - GRANT_S
        self._answered_at = now
        self.is_lost = False

    def are_due(self, now: float) -> bool:
        """Whether the engine gets more time."""
        return not self.is_lost and now >= self._granted_at + GRANT_S

    def granted(self, now: float) -> None:
        """Note that a grant is sent."""
        self._granted_at = now

    def answered(self, granted_at: float) -> None:
        """Note an answer to the grant of some time."""
        self._answered_at = max(self._answered_at, granted_at)

    def judge(self, now: float) -> None:
        """Stop granting after a silence. To be called when nothing waits to be read."""
        self.is_lost = self.is_lost or now > self._answered_at + self._silence_s

    def lose(self) -> None:
        """Stop granting, since the connection has ended."""
        self.is_lost = True

    def have_run_out(self, now: float) -> bool:
        """Whether the last grant has run out, and with it the time for a last step."""
        return self.is_lost and now > self._granted_at + LEASE_S + ENDING_S


class ClockDifference:
    """How far this clock is ahead of another machine's, by messages that go there and back."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=NUM_SAMPLES)

    def observe(self, sent_at: int, there: int, now: int) -> None:
        """Note a message that was there and is back now; ns, each by the clock of its machine."""
        self._samples.append((now - sent_at, (sent_at + now) // 2 - there))

    @property
    def ahead(self) -> int | None:
        """The difference in ns, as the quickest message has it; None is not known."""
        return min(self._samples)[1] if self._samples else None
