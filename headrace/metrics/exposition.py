"""Metric families as Prometheus text 0.0.4, which `prometheus_client` writes ten times slower.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

from headrace.board.histogram import HistogramSum
from headrace.board.histogram_bounds import Bounds

NUM_SPELLED = 4096  # numbers whose texts are kept; most of a page are zeros
VALUE = "%s"  # its place in a line


@lru_cache(NUM_SPELLED)
def spelled(value: float) -> str:
    """Return a number as `prometheus_client` writes it: dashboards name some bounds by it."""
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


class HistogramFamily(Metric):
    """A family of histograms, kept as sums: a sample for each bucket would cost most of a page.

    Attributes:
        rows: the labels' values, the histogram, and the bounds by which it is reported.
    """

    def __init__(self, name: str, documentation: str, labels: list[str]) -> None:
        super().__init__(name, documentation, "histogram")
        self.labels = labels
        self.rows: list[tuple[list[str], HistogramSum, Bounds]] = []

    def add(self, values: list[str], spread: HistogramSum, bounds: Bounds) -> None:
        """Add a histogram."""
        self.rows.append((values, spread, bounds))

    def lines(self, values: list[str], bounds: Bounds) -> Iterator[str]:
        """Yield the lines of a row, their values to be filled in."""
        labels = dict(zip(self.labels, values, strict=True))
        for bound in (*map(spelled, bounds), "+Inf"):
            yield line(f"{self.name}_bucket", labels | {"le": bound})
        for part in ("count", "sum"):
            yield line(f"{self.name}_{part}", labels)


class Exposition:
    """A writer that keeps the text around the values: it is the same each time."""

    def __init__(self) -> None:
        self._heads: dict[str, str] = {}  # of families
        self._lines: dict[tuple[str, ...], str] = {}

    def text(self, families: Iterable[Metric]) -> bytes:
        """Return the text of families."""
        parts: list[str] = []
        for family in families:
            head = self._heads.get(family.name)
            if head is None:
                head = self._heads[family.name] = head_of(family)
            parts.append(head)
            if isinstance(family, HistogramFamily):
                parts += self._histograms(family)
            for sample in family.samples:
                key = (sample.name, *sample.labels.values())
                text = self._lines.get(key)
                if text is None:
                    text = self._lines[key] = line(sample.name, sample.labels)
                parts.append(text % spelled(sample.value))
        return "".join(parts).encode()

    def _histograms(self, family: HistogramFamily) -> Iterator[str]:
        for values, spread, bounds in family.rows:
            key = (family.name, *values)
            text = self._lines.get(key)
            if text is None:
                text = self._lines[key] = "".join(family.lines(values, bounds))
            numbers = (*spread.at_most(bounds), spread.count, spread.count, spread.sum)
            yield text % tuple(map(spelled, numbers))


def head_of(family: Metric) -> str:
    """Return the HELP and TYPE lines of a family."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    help = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {help}\n# TYPE {name} {family.type}\n"


def line(name: str, labels: dict[str, str]) -> str:
    """Return a sample's line, its value to be filled in by `%`."""
    pairs = ",".join(f'{label}="{escaped(value)}"' for label, value in sorted(labels.items()))
    start = f"{name}{{{pairs}}}" if pairs else name
    return f"{start.replace('%', '%%')} {VALUE}\n"


def escaped(value: str) -> str:
    """Return a label's value as it is written between quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
