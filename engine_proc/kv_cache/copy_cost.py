"""What copies of pages and states cost, as measured. Pure."""

DECAY = 0.5  # of what was known, per measurement
HOPE = 0.9  # times the cost, each time that it was too high: it may have fallen


class CopyCost:
    """Seconds per byte.

    Args:
        s_per_byte: before any is measured.
    """

    def __init__(self, s_per_byte: float) -> None:
        self._s_per_byte = s_per_byte

    def seconds(self, num_bytes: int) -> float:
        """Return what so many bytes take."""
        return num_bytes * self._s_per_byte

    def measure(self, seconds: float, num_bytes: int) -> None:
        """Note what so many bytes have taken."""
        self._s_per_byte += DECAY * (seconds / num_bytes - self._s_per_byte)

    def hope(self) -> None:
        """Note that a copy was not made for its cost."""
        self._s_per_byte *= HOPE
