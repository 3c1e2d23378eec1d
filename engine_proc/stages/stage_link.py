"""The way to a stage: two connections, since what follows large messages waits for them.

One has grants, and tells whether the machine is there. The other has steps or hidden states, which
may take long where a link is narrow.
"""

from typing import Any

from headrace.ipc.curve_key import CurveKey
from headrace.ipc.curve_links import CurveLink
from headrace.ipc.sockets import Frame


class StageLink:
    """Both connections, used as one link.

    Args:
        keeps_alive: as in `CurveLink`; otherwise grants show whether the machine is there.
    """

    def __init__(self, where: str, key: CurveKey, keeps_alive: bool = False) -> None:
        """Begin to connect.

        Raises:
            ValueError: it is no address.
        """
        self._prompt = CurveLink(where, key, keeps_alive)
        self._large = CurveLink(where, key)
        self._both = (self._prompt, self._large)

    @property
    def polled(self) -> list[tuple[Any, int]]:
        """What tells that there is something to do here."""
        return [one for link in self._both for one in link.polled]

    @property
    def is_connected(self) -> bool:
        """Whether messages can go."""
        return all(link.is_connected for link in self._both)

    def lost_connections(self) -> int:
        """Return how many connections have ended since the last call."""
        return sum([link.lost_connections() for link in self._both])

    def receive(self) -> list[Frame] | None:
        """Return the next answer to grants, or what comes with those; or None."""
        return self._prompt.receive()

    def grant(self, frames: list[Frame]) -> bool:
        """Send a grant, as `send`. It waits for no message that is sent."""
        return self._prompt.send(frames)

    def send(self, frames: list[Frame]) -> bool:
        """Send a message; return False where there is no connection, or it is full."""
        return self._large.send(frames)

    def close(self) -> None:
        """Drop the connections with what waits."""
        for link in self._both:
            link.close()
