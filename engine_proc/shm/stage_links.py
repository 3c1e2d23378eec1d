"""The links of a pipeline stage to its neighbors: one frame of each for each step, in order."""

from headrace.engine_proc.shm.hidden_link import HiddenLink, Rows

WAIT_S = 0.5  # between looks, in which signals are handled


class StageLinks:
    """Both ends that a stage's worker has.

    A step that has failed in a stage goes on as a frame that says so. So the frames of steps after
    it stay theirs.

    Args:
        before: from the stage before; None in the first.
        after: to the next stage; None in the last.
    """

    def __init__(self, before: HiddenLink | None = None, after: HiddenLink | None = None) -> None:
        self._before = before
        self._after = after
        self._num_rows = 0

    def begin(self) -> bool:
        """Wait for the hidden states of the next step; return whether it has worked so far."""
        if self._before is None:
            return True
        while not self._before.wait(WAIT_S):
            pass
        return self._before.rows() is not None

    @property
    def hidden(self) -> Rows | None:
        """What the step's tokens come in as, until `end`; None in the first stage."""
        return None if self._before is None else self._before.rows()

    def room(self, num_rows: int) -> Rows:
        """Return the rows that the next stage gets when the step ends."""
        assert self._after is not None, "the last stage passes nothing on"
        self._num_rows = num_rows
        return self._after.room(num_rows)

    def end(self, works: bool) -> None:
        """Pass a step on that works, or that it has failed."""
        if self._before is not None:
            self._before.release()
        if self._after is None:
            return
        if works:
            self._after.send(self._num_rows)
        else:
            self._after.send()
