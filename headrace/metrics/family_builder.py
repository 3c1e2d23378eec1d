"""Board values at one moment, summed over processes, and metric families made of them."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

from headrace.board.board import Board, Counts, Timing
from headrace.board.fields import EngineField
from headrace.board.histogram import HistogramSum
from headrace.board.histogram_bounds import Bounds
from headrace.metrics.exposition import HistogramFamily

Labels = dict[str, str]


class BoardTotals:
    """Sums over some processes, or what they count for one model, by role."""

    def __init__(self, slots: Iterable[Counts]) -> None:
        self._by_role: dict[str, list[Counts]] = {}
        for slot in slots:
            self._by_role.setdefault(slot.seat.role, []).append(slot)

    @classmethod
    def of_model(cls, board: Board, model: int) -> "BoardTotals":
        """Return what processes that serve all models count for one, and its engines count."""
        engines = [slot for slot in board.of("engine") if slot[EngineField.MODEL] == model]
        others = [slot for slot in board.slots if board.engine_of(slot) is None]
        return cls([*engines, *(slot.of_model(model) for slot in others)])

    def total(self, role: str, field: int) -> int:
        """Return the sum of a field."""
        return sum(slot[field] for slot in self._by_role.get(role, ()))

    def engine(self, field: int) -> int:
        """Return a field of the engines."""
        return self.total("engine", field)

    def spread(self, role: str, span: Timing) -> HistogramSum:
        """Return the sum of a histogram."""
        slots = self._by_role.get(role, ())
        return HistogramSum((slot.histogram(span) for slot in slots), span.scale)

    @property
    def kv_usage(self) -> float:
        """The share of KV pages in use, 0 to 1."""
        pages = self.engine(EngineField.PAGES_TOTAL)
        return 1 - self.engine(EngineField.PAGES_FREE) / pages if pages else 0.0


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


def merged(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yield each family once, with the samples of all that have its name."""
    found: dict[str, Metric] = {}
    for family in families:
        first = found.setdefault(family.name, family)
        if first is family:
            continue
        first.samples += family.samples
        if isinstance(first, HistogramFamily) and isinstance(family, HistogramFamily):
            first.rows += family.rows
    yield from found.values()
