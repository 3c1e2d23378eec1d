"""HTTP metrics of the frontends, in the names of two dialects.

vLLM's are those of prometheus-fastapi-instrumentator
(https://github.com/trallnag/prometheus-fastapi-instrumentator), SGLang's its own.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from headrace.board import histogram_bounds
from headrace.board.board import Board
from headrace.board.histogram import Histogram, HistogramSum
from headrace.board.http_counts import SECONDS, HttpCounts, HttpRow, RowKey
from headrace.metrics.exposition import HistogramFamily


@dataclass
class RouteCounts:
    """The counts of a route with requests, summed over frontends."""

    num_begun: int = 0
    responses: Counter[int] = field(default_factory=Counter)  # by status
    num_received_bytes: int = 0
    num_sent_bytes: int = 0
    durations: list[Histogram] = field(default_factory=list)

    def add(self, row: HttpRow) -> None:
        """Add what one of them has."""
        self.num_begun += row.num_begun
        self.responses.update(row.responses)
        self.num_received_bytes += row.num_received_bytes
        self.num_sent_bytes += row.num_sent_bytes
        self.durations.append(row.durations)

    @property
    def num_responses(self) -> int:
        """Number of responses."""
        return self.responses.total()


def routes_of(board: Board) -> dict[RowKey, RouteCounts]:
    """Return the counts on a board by route; only of routes with requests."""
    found: dict[RowKey, RouteCounts] = {}
    for slot in board.of("frontend"):
        for route, row in HttpCounts(slot.http_words):
            if row.num_begun:
                found.setdefault(route, RouteCounts()).add(row)
    return found


class VllmHttpCollector(Collector):
    """The instrumentator's families. `handler` is a path, or "none" where none is served."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        routes = routes_of(self._board)
        requests = CounterMetricFamily(
            "http_requests",
            "Requests by what became of them",
            labels=["method", "status", "handler"],
        )
        for route, one in routes.items():
            for status, count in grouped(one.responses).items():
                requests.add_metric([route.method, status, route.path], count)
        yield requests
        yield from self._sizes(routes)
        by_handler = HistogramFamily(
            "http_request_duration_seconds",
            "From a request's head to its last byte, coarse",
            labels=["method", "handler"],
        )
        for route, one in routes.items():
            spread = HistogramSum(one.durations, SECONDS)
            by_handler.add(list(route), spread, histogram_bounds.HTTP_BY_HANDLER)
        yield by_handler
        everything = HistogramFamily(
            "http_request_duration_highr_seconds",
            "From a request's head to its last byte",
            labels=[],
        )
        durations = (d for one in routes.values() for d in one.durations)
        everything.add([], HistogramSum(durations, SECONDS), histogram_bounds.HTTP)
        yield everything

    def _sizes(self, routes: dict[RowKey, RouteCounts]) -> Iterator[Metric]:
        """Yield how large bodies were, as their heads declare them: streams count as empty."""
        counts, received, sent = Counter[str](), Counter[str](), Counter[str]()
        for route, one in routes.items():
            counts[route.path] += one.num_responses
            received[route.path] += one.num_received_bytes
            sent[route.path] += one.num_sent_bytes
        for name, help, sums in [
            ("http_request_size_bytes", "Declared length of requests", received),
            ("http_response_size_bytes", "Declared length of answers", sent),
        ]:
            family = SummaryMetricFamily(name, help, labels=["handler"])
            for path, count in counts.items():
                family.add_metric([path], count, sums[path])
            yield family


class SglangHttpCollector(Collector):
    """SGLang's families. `endpoint` is a path, or "none" where none is served."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        routes = routes_of(self._board)
        labels = ["endpoint", "method"]
        requests = CounterMetricFamily("sglang:http_requests", "Requests begun", labels=labels)
        active = GaugeMetricFamily("sglang:http_requests_active", "Requests open", labels=labels)
        responses = CounterMetricFamily(
            "sglang:http_responses",
            "Requests by what became of them",
            labels=["endpoint", "status_code", "method"],
        )
        for (method, path), one in routes.items():
            requests.add_metric([path, method], one.num_begun)
            active.add_metric([path, method], one.num_begun - one.num_responses)
            for status, count in one.responses.items():
                if count:
                    responses.add_metric([path, str(status), method], count)
        yield from (requests, responses, active)


def grouped(responses: Counter[int]) -> Counter[str]:
    """Return how many answers there were of each class of statuses: "2xx" and so on."""
    found = Counter[str]()
    for status, count in responses.items():
        if count:
            found[f"{status // 100}xx"] += count
    return found
