"""The last hour: a point of figures every ten seconds, and how latencies are distributed.

Some 0.4 MB at most. A replacement of the process that keeps it begins anew.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from headrace.board.board import Board, Timing
from headrace.board.fields import EngineField
from headrace.board.histogram import SECONDS, HistogramSum
from headrace.board.histogram_bounds import HEADRACE, Bounds

INTERVAL_S = 10.0
NUM_POINTS = 360  # an hour
SIGNIFICANT = 4  # digits


class HistoryPoint(msgspec.Struct):
    """Figures of one interval. Null is that there was nothing to measure.

    `p50` and `p99` are percentiles, interpolated within buckets.
    """

    at: float  # its end, seconds since the epoch
    generated_tokens_per_s: float
    computed_tokens_per_s: float  # of prompts, too
    finished_per_s: float  # sequences run to their end
    running: float  # sequences, at the end
    waiting: float
    kv_usage: float  # share of KV pages in use at the end, 0 to 1
    prefix_hit_rate: float | None  # share of tokens of prompts found in the prefix cache, 0 to 1
    loop_lag_p99_s: float | None  # how late timers of frontends fire
    time_to_first_token_p50_s: float | None  # from a request's head to its first text
    time_to_first_token_p99_s: float | None
    inter_token_latency_p50_s: float | None  # from one piece of a text to the next
    inter_token_latency_p99_s: float | None
    e2e_latency_p50_s: float | None  # from a request's head to its last byte
    e2e_latency_p99_s: float | None


class Distribution(msgspec.Struct):
    """A histogram of the last hour."""

    bounds: list[float]  # upper ones, inclusive, seconds
    counts: list[int]  # one for each bound, and one for what is beyond all


class HourHistory(msgspec.Struct, tag_field="type", tag="history"):
    """The data of the event `history`."""

    interval_s: float
    columns: dict[str, list[float | None]]  # by the fields of `HistoryPoint`, oldest point first
    distributions: dict[str, Distribution]


class HistoryNews(msgspec.Struct, tag_field="type", tag="point"):
    """The data of the event `point`: the newest one, and the distributions of the hour up to it."""

    point: HistoryPoint
    distributions: dict[str, Distribution]


class HistogramSource(NamedTuple):
    """A histogram of all processes of a role."""

    role: str
    span: Timing


LATENCIES = {
    "time_to_first_token": HistogramSource("frontend", Timing.FIRST_TOKEN),
    "inter_token_latency": HistogramSource("engine", Timing.BETWEEN),
    "e2e_latency": HistogramSource("frontend", Timing.WHOLE),
}
LAG = "loop_lag"
SOURCES = {**LATENCIES, LAG: HistogramSource("frontend", Timing.LOOP_LAG)}
RATES = {
    "generated_tokens_per_s": EngineField.GENERATED_TOKENS,
    "computed_tokens_per_s": EngineField.COMPUTED_TOKENS,
    "finished_per_s": EngineField.FINISHED,
}
COUNTERS = (*RATES.values(), EngineField.PREFIX_QUERIES, EngineField.PREFIX_HITS)
Counts = dict[str, list[int]]  # cumulated by all bounds, by histogram


class History:
    """The points of the last hour, and the counts of histograms at each."""

    def __init__(self, board: Board, now: float) -> None:
        """Begin at `now`, in seconds of a monotonic clock."""
        self._board = board
        self._points: deque[HistoryPoint] = deque(maxlen=NUM_POINTS)
        self._ended_at = now
        self._counters = self._read_counters()
        self._counts = self._read_counts()
        self._hour: deque[dict[str, array[int]]] = deque(maxlen=NUM_POINTS + 1)
        self._hour.append(coarse(self._counts))

    @property
    def due_at(self) -> float:
        """When the next point is due."""
        return self._ended_at + INTERVAL_S

    def add(self, now: float, at: float) -> HistoryPoint:
        """Add the point of the interval that ends now; `at` is in seconds since the epoch."""
        seconds = now - self._ended_at
        counters, counts = self._read_counters(), self._read_counts()
        grown = {field: counters[field] - self._counters[field] for field in counters}
        queries = grown[EngineField.PREFIX_QUERIES]
        pages = self._engines(EngineField.PAGES_TOTAL)
        lag = self._percentiles(LAG, counts)
        found: dict[str, float | None] = {
            # Pages that other prompts have filled meanwhile are hits without a query.
            "prefix_hit_rate": min(grown[EngineField.PREFIX_HITS] / queries, 1)
            if queries
            else None,
            "loop_lag_p99_s": lag[1],
        }
        for name, field in RATES.items():
            found[name] = grown[field] / seconds
        for name in LATENCIES:
            found[f"{name}_p50_s"], found[f"{name}_p99_s"] = self._percentiles(name, counts)
        found["running"] = self._engines(EngineField.RUNNING)
        found["waiting"] = self._engines(EngineField.WAITING)
        found["kv_usage"] = 1 - self._engines(EngineField.PAGES_FREE) / pages if pages else 0.0
        rounded = {name: short(value) for name, value in found.items()}
        point = msgspec.convert({"at": round(at, 1), **rounded}, HistoryPoint)
        self._ended_at, self._counters, self._counts = now, counters, counts
        self._points.append(point)
        self._hour.append(coarse(counts))
        return point

    def hour(self) -> HourHistory:
        """Return all points."""
        names = HistoryPoint.__struct_fields__
        columns = {name: [getattr(point, name) for point in self._points] for name in names}
        return HourHistory(INTERVAL_S, columns, self.distributions())

    def distributions(self) -> dict[str, Distribution]:
        """Return the latencies of the last hour, up to the newest point."""
        oldest, newest = self._hour[0], self._hour[-1]
        found = {}
        for name in LATENCIES:
            up_to = [new - old for new, old in zip(newest[name], oldest[name], strict=True)]
            found[name] = Distribution(list(HEADRACE), apart(up_to))
        return found

    def _percentiles(self, name: str, counts: Counts) -> tuple[float | None, float | None]:
        """Return the median and the 99th percentile since the last point."""
        up_to = [new - old for new, old in zip(counts[name], self._counts[name], strict=True)]
        return percentile(SECONDS.bounds, up_to, 0.5), percentile(SECONDS.bounds, up_to, 0.99)

    def _engines(self, field: EngineField) -> int:
        return sum(slot[field] for slot in self._board.of("engine"))

    def _read_counters(self) -> dict[EngineField, int]:
        return {field: self._engines(field) for field in COUNTERS}

    def _read_counts(self) -> Counts:
        found = {}
        for name, (role, span) in SOURCES.items():
            parts = [part for slot in self._board.of(role) for part in self._board.parts_of(slot)]
            whole = HistogramSum(part.histogram(span) for part in parts)
            found[name] = [*whole.at_most(SECONDS.bounds), whole.count]
        return found


def coarse(counts: Counts) -> dict[str, "array[int]"]:
    """Return the counts of latencies at the bounds of `Distribution`."""
    places = [*SECONDS.places(HEADRACE), -1]
    return {name: array("Q", [counts[name][place] for place in places]) for name in LATENCIES}


def apart(up_to: Iterable[int]) -> list[int]:
    """Return the counts of buckets from cumulated ones."""
    found, before = [], 0
    for count in up_to:
        found.append(count - before)
        before = count
    return found


def percentile(bounds: Bounds, up_to: list[int], share: float) -> float | None:
    """Return a percentile, linear within its bucket, or None of nothing.

    Beyond all bounds it is the last one. The method is that of Prometheus' `histogram_quantile`.

    Args:
        up_to: cumulated counts, one for each bound and one for all.
    """
    rank = share * up_to[-1]
    if not rank:
        return None
    low, below = 0.0, 0
    for bound, count in zip(bounds, up_to, strict=False):
        if count >= rank:
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return bounds[-1]


def short(value: float | None) -> float | None:
    """Return a number with few digits: an hour of them is sent to each page."""
    return None if value is None else float(f"{value:.{SIGNIFICANT}g}")
