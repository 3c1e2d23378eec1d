"""HTTP counters of a frontend by route, in words of its board slot.

A route is a path and its method, or a method alone where nothing is served. Each has a row:

0 …     requests begun, then answers by status
…       how long they took, a histogram
last 2  bytes of the requests' bodies and of the answers', as their heads declare them
"""

from collections.abc import Iterator
from typing import NamedTuple

from headrace.board import histogram_bounds
from headrace.board.histogram import Histogram, Scale
from headrace.routes import GET, HEAD, POST, ROUTES

NOWHERE = "none"  # the path of what is not served
METHODS = (GET, POST, "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "OTHER")
CLIENT_LEFT = 499  # before there was an answer; the number is nginx's
STATUSES = (200, 400, 401, 404, 405, 413, 415, 429, CLIENT_LEFT, 500, 503)
PLACES = {status: place for place, status in enumerate(STATUSES, 1)}

SECONDS = Scale(histogram_bounds.HTTP, units=10**9)  # ns
DURATIONS = 1 + len(STATUSES)
RECEIVED = DURATIONS + SECONDS.num_buckets + 1
SENT = RECEIVED + 1
ROW_WORDS = SENT + 1


class RowKey(NamedTuple):
    """A path with a method, or a method alone."""

    method: str
    path: str


ROWS = (
    *(RowKey(route.method, path) for route in ROUTES if route.is_counted for path in route.paths),
    *(RowKey(method, NOWHERE) for method in METHODS),
)
NOT_COUNTED = [
    RowKey(route.method, path) for route in ROUTES if not route.is_counted for path in route.paths
]
HTTP_WORDS = ROW_WORDS * (len(ROWS) + 1)  # the last row is of what is not counted


class HttpRow:
    """The counts of one route. One process writes them."""

    def __init__(self, words: "memoryview[int]") -> None:
        """Use `ROW_WORDS` words."""
        self._words = words
        self.durations = Histogram(words[DURATIONS:RECEIVED], SECONDS)

    def begin(self) -> None:
        """Count a request that has come."""
        self._words[0] += 1

    def end(self, status: int, duration_ns: int, num_received: int, num_sent: int) -> None:
        """Count its answer, or that there was none."""
        words = self._words
        words[PLACES[status]] += 1
        words[RECEIVED] += num_received
        words[SENT] += num_sent
        self.durations.observe(duration_ns)

    def settle(self) -> None:
        """Count as failed what a process had begun that is no more."""
        self._words[PLACES[500]] += self.num_begun - sum(self._words[1:DURATIONS])

    @property
    def num_begun(self) -> int:
        """Number of requests begun."""
        return self._words[0]

    @property
    def responses(self) -> dict[int, int]:
        """Number of responses, by status."""
        return {status: self._words[place] for status, place in PLACES.items()}

    @property
    def num_received_bytes(self) -> int:
        """Bytes of the requests' bodies."""
        return self._words[RECEIVED]

    @property
    def num_sent_bytes(self) -> int:
        """Bytes of the answers; of those that stream, none."""
        return self._words[SENT]


class HttpCounts:
    """All rows of a frontend."""

    def __init__(self, words: "memoryview[int]") -> None:
        """Use `HTTP_WORDS` words."""
        starts = range(0, HTTP_WORDS, ROW_WORDS)
        *rows, not_counted = [HttpRow(words[start : start + ROW_WORDS]) for start in starts]
        self._rows = dict(zip(ROWS, rows, strict=True))
        self._found: dict[tuple[str, str], HttpRow] = {(m, path): r for (m, path), r in self}
        self._found |= dict.fromkeys(NOT_COUNTED, not_counted)

    def row(self, method: str, path: str) -> HttpRow:
        """Return the row of a request."""
        found = self._found.get((GET if method == HEAD else method, path))
        return self._rows[nowhere(method)] if found is None else found

    def settle(self) -> None:
        """Count what a frontend had open that has died; for the one in its place."""
        for _, row in self:
            row.settle()

    def __iter__(self) -> Iterator[tuple[RowKey, HttpRow]]:
        """Yield the rows to be exported."""
        return iter(self._rows.items())


def nowhere(method: str) -> RowKey:
    """Return the key of requests to unknown paths."""
    return RowKey(method if method in METHODS else METHODS[-1], NOWHERE)
