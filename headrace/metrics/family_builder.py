"""Board values at one moment, summed over processes, and metric families made of them."""

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

from headrace.board.board import Board, Field, Timing
from headrace.board.histogram import HistogramSum
from headrace.board.histogram_bounds import Bounds
from headrace.metrics.exposition import HistogramFamily

Labels = dict[str, str]


class BoardTotals:
    """Sums over the processes of a role."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def total(self, role: str, field: int) -> int:
        """Return the sum of a field."""
        return sum(slot[field] for slot in self._board.of(role))

    def engine(self, field: int) -> int:
        """Return a field of the engine."""
        return self.total("engine", field)

    def spread(self, role: str, span: Timing) -> HistogramSum:
        """Return the sum of a histogram."""
        return HistogramSum((slot.histogram(span) for slot in self._board.of(role)), span.scale)

    @property
    def kv_usage(self) -> float:
        """The share of KV pages in use, 0 to 1."""
        pages = self.engine(Field.PAGES_TOTAL)
        return 1 - self.engine(Field.PAGES_FREE) / pages if pages else 0.0


class Families:
    """Metric families whose samples share a prefix and some labels."""

    def __init__(self, prefix: str, labels: Labels) -> None:
        self._prefix = prefix
        self._labels = labels

    def counter(self, name: str, help: str, samples: list[tuple[Labels, float]]) -> Metric:
        """Return a counter, called `name`_total, with a sample for each set of further labels."""
        family = CounterMetricFamily(self._prefix + name, help, labels=self._names(samples))
        for labels, value in samples:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        return family

    def gauge(self, name: str, help: str, samples: list[tuple[Labels, float]]) -> Metric:
        """Return a gauge, with a sample for each set of further labels."""
        family = GaugeMetricFamily(self._prefix + name, help, labels=self._names(samples))
        for labels, value in samples:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        return family

    def histogram(self, name: str, help: str, spread: HistogramSum, bounds: Bounds) -> Metric:
        """Return a histogram."""
        family = HistogramFamily(self._prefix + name, help, list(self._labels))
        family.add(list(self._labels.values()), spread, bounds)
        return family

    def _names(self, samples: list[tuple[Labels, float]]) -> list[str]:
        return [*self._labels, *samples[0][0]]
