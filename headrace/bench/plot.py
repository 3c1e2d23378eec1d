"""Plots of a load: the distribution of latencies, and the load over time."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import extras
from headrace.bench.figures import TITLES, Floats, RequestTimes, per_second
from headrace.bench.load import LoadResult
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image

WIDTH, HEIGHT, MARGIN = 420, 200, 44  # of a panel; pixels
TOP = 24  # for the title
COLUMNS = 2
NUM_POINTS = 200  # of a curve
FONT_SIZE = 11
INK, FRAME, CURVE = "#222", "#999", "#1f6feb"
STYLE = f"font-family='sans-serif' font-size='{FONT_SIZE}' fill='{INK}'"
SCALE = 2  # pixels of a PNG to one of an SVG
ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}  # SVG's, as Pillow has them
SUFFIXES = (".svg", ".html", ".png")

Point = tuple[float, float]


@dataclass(frozen=True)
class Panel:
    """One curve: x and y from zero up."""

    title: str
    x_label: str
    x: Floats
    y: Floats

    @property
    def x_max(self) -> float:
        """Right end of the x axis."""
        return float(self.x.max(initial=0)) or 1.0

    @property
    def y_max(self) -> float:
        """Top of the y axis."""
        return float(self.y.max(initial=0)) or 1.0

    def frame(self) -> list[Point]:
        """Return the axes."""
        base = HEIGHT - MARGIN
        return [(MARGIN, MARGIN), (MARGIN, base), (WIDTH - MARGIN, base)]

    def curve(self) -> list[Point]:
        """Return the points of the curve."""
        wide, high = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
        x = MARGIN + wide * self.x / self.x_max
        y = MARGIN + high * (1 - self.y / self.y_max)
        return list(zip(x.tolist(), y.tolist(), strict=True))

    def texts(self) -> list[tuple[Point, str, str]]:
        """Return the position, anchor and content of texts."""
        base, right = HEIGHT - MARGIN, WIDTH - MARGIN
        return [
            ((MARGIN, MARGIN - 10), "start", self.title),
            ((MARGIN - 4, MARGIN + 8), "end", f"{self.y_max:,.4g}"),
            ((MARGIN - 4, base), "end", "0"),
            ((MARGIN, base + 14), "middle", "0"),
            ((right, base + 14), "middle", f"{self.x_max:,.4g}"),
            ((WIDTH / 2, base + 14), "middle", self.x_label),
        ]


def distribution(title: str, values: Floats) -> Panel:
    """Return the share of values that are at most x."""
    values = np.sort(values[~np.isnan(values)])
    shares = np.linspace(0, 100, NUM_POINTS)
    x = np.zeros(NUM_POINTS)
    if len(values):
        x[:] = np.percentile(values, shares)
    return Panel(f"{title}: % of all within", "ms", x, shares)


def panels_of(outcome: LoadResult) -> list[Panel]:
    """Return everything that is drawn."""
    good = [record for record in outcome.records if not record.error]
    times = RequestTimes.of(good)
    panels = [
        distribution(title, values)
        for metric, title in TITLES.items()
        if len(values := getattr(times, metric)) and not np.isnan(values).all()
    ]
    tokens, concurrency = per_second(good, outcome.start)
    seconds = np.arange(len(tokens), dtype=np.float64)
    panels.append(Panel("Output tokens in each second", "s", seconds, tokens))
    panels.append(Panel("Open requests in each second", "s", seconds, concurrency))
    return panels


def placed(panels: list[Panel]) -> Iterator[tuple[Point, Panel]]:
    """Yield panels with their corners."""
    for i, panel in enumerate(panels):
        yield (WIDTH * (i % COLUMNS), TOP + HEIGHT * (i // COLUMNS)), panel


def size_of(panels: list[Panel]) -> tuple[int, int]:
    """Return how wide and high all is."""
    return WIDTH * COLUMNS, TOP + HEIGHT * -(-len(panels) // COLUMNS)


def draw(panels: list[Panel], title: str) -> str:
    """Return an SVG document."""
    wide, high = size_of(panels)
    drawn = "".join(svg_of(panel, corner) for corner, panel in placed(panels))
    size = f"width='{wide}' height='{high}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size}><rect {size} fill='white'/>"
        f"<text x='{MARGIN}' y='18' {STYLE}>{escape(title)}</text>{drawn}</svg>\n"
    )


def svg_of(panel: Panel, corner: Point) -> str:
    """Return a panel as a group."""
    frame, curve = (
        " ".join(f"{x:.1f},{y:.1f}" for x, y in points) for points in (panel.frame(), panel.curve())
    )
    labels = "".join(
        f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' {STYLE}>{escape(text)}</text>"
        for (x, y), anchor, text in panel.texts()
    )
    return (
        f"<g transform='translate({corner[0]},{corner[1]})'>"
        f"<path d='M{frame}' fill='none' stroke='{FRAME}'/>"
        f"<polyline points='{curve}' fill='none' stroke='{CURVE}' stroke-width='1.5'/>"
        f"{labels}</g>"
    )


def check_plot(path: Path) -> None:
    """Check the file of `--plot`.

    Raises:
        ConfigError: it ends in none of `SUFFIXES`, or is a PNG and Pillow is missing.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path} must end in {' or '.join(SUFFIXES)}")
    if path.suffix == ".png":
        extras.require("images", f"--plot {path}")


def paint(panels: list[Panel], title: str) -> "Image.Image":
    """Return the same in pixels."""
    from PIL import Image, ImageDraw, ImageFont

    wide, high = size_of(panels)
    image = Image.new("RGB", (SCALE * wide, SCALE * high), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=SCALE * FONT_SIZE)
    pen.text((SCALE * MARGIN, SCALE * 18), title, INK, font, anchor="ls")
    for (left, top), panel in placed(panels):

        def at(point: Point, left: float = left, top: float = top) -> Point:
            return SCALE * (left + point[0]), SCALE * (top + point[1])

        pen.line([*map(at, panel.frame())], FRAME, SCALE)
        pen.line([*map(at, panel.curve())], CURVE, round(1.5 * SCALE), joint="curve")
        for where, anchor, text in panel.texts():
            pen.text(at(where), text, INK, font, anchor=ANCHORS[anchor])
    return image


def write_plot(path: Path, outcome: LoadResult, result: dict[str, Any]) -> None:
    """Write the plot: SVG, a PNG, or, in a `.html` file, a page with the figures below it."""
    title = f"{result['model_id']}, {result['num_prompts']} requests, rate {result['request_rate']}"
    write_panels(path, panels_of(outcome), title, result)


def write_panels(path: Path, panels: list[Panel], title: str, result: dict[str, Any]) -> None:
    """Write panels under a title; a page has the result's figures, too."""
    if path.suffix == ".png":
        paint(panels, title).save(path)
        return
    svg = draw(panels, title)
    if path.suffix == ".svg":
        path.write_text(svg)
        return
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(number(value))}</td></tr>"
        for name, value in result.items()
    )
    path.write_text(
        "<!doctype html><meta charset='utf-8'>"
        f"<title>{escape(title)}</title>{svg}<table>{rows}</table>\n"
    )


def number(value: object) -> str:
    """Return a figure as people read it."""
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
