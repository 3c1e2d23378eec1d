"""Restart backoff of dead processes: at once, then later and later, then maybe never. Pure."""

DELAYS_S = (0.0, 0.5, 2.0)  # before each new start after deaths in a row
PATIENT_S = 10.0  # and after those, where starting goes on


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

    def patient_delay_s(self) -> float:
        """Note a death of what is always started again; return how long to wait."""
        delay_s = self.delay_s()
        return PATIENT_S if delay_s is None else delay_s
