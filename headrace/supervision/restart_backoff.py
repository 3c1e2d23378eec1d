"""Restart backoff of dead processes: at once, then later and later, then never. Pure."""

DELAYS_S = (0.0, 0.5, 2.0)  # before each new start after deaths in a row


class RestartBackoff:
    """The deaths in a row of one process or group: such as did no work in between."""

    def __init__(self) -> None:
        self._num_in_a_row = 0

    def worked(self) -> None:
        """Note that work was done: the next death is the first of a row."""
        self._num_in_a_row = 0

    def delay_s(self) -> float | None:
        """Note a death; return how long to wait, or None where starting again is hopeless."""
        self._num_in_a_row += 1
        if self._num_in_a_row > len(DELAYS_S):
            return None
        return DELAYS_S[self._num_in_a_row - 1]
