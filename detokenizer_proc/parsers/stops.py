"""Stop strings, which may begin in one token and end in another."""


class StopMatcher:
    """Finds the first stop string in a stream of text; gives out what cannot be part of one."""

    def __init__(self, stops: list[str], include_stop: bool = False) -> None:
        """`stops` may be empty; `include_stop` leaves the stop string found in the text."""
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""
        self.found: str | None = None  # the stop string that has ended the text

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.found is not None

    def feed(self, text: str) -> str:
        """Return the text that is now certain to come before any stop string."""
        if not self._stops:
            return text
        self._held += text
        found = [(at + len(s), at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            # The first to be complete, so that how text comes in pieces changes nothing.
            end, start, self.found = min(found)
            given = self._held[: end if self._include_stop else start]
            self._held = ""
            return given
        keep = max(overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        given, self._held = self._held[:cut], self._held[cut:]
        return given

    def flush(self) -> str:
        """Return the held-back text, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`, less than all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
