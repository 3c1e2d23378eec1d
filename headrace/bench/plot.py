"""What a load found, drawn: how latencies are distributed, and the load over time. Plain SVG."""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.figures import TITLES, Floats, Times, per_second
from headrace.bench.load import Outcome

WIDTH, HEIGHT, MARGIN = 420, 200, 44  # of a panel; pixels
COLUMNS = 2
NUM_POINTS = 200  # of a curve
STYLE = "font-family='sans-serif' font-size='11' fill='#222'"


@dataclass(frozen=True)
class Panel:
    """One curve: x and y from zero up."""

    title: str
    x_label: str
    x: Floats
    y: Floats

    def svg(self, left: int, top: int) -> str:
        """Draw it with its corner at (left, top)."""
        x_max = float(self.x.max(initial=0)) or 1.0
        y_max = float(self.y.max(initial=0)) or 1.0
        wide, high = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
        points = " ".join(
            f"{MARGIN + wide * x / x_max:.1f},{MARGIN + high * (1 - y / y_max):.1f}"
            for x, y in zip(self.x, self.y, strict=True)
        )
        base = MARGIN + high
        frame = f"M{MARGIN} {MARGIN}V{base}H{MARGIN + wide}"
        texts = [
            (MARGIN, MARGIN - 10, "start", self.title),
            (MARGIN - 4, MARGIN + 8, "end", f"{y_max:,.4g}"),
            (MARGIN - 4, base, "end", "0"),
            (MARGIN, base + 14, "middle", "0"),
            (MARGIN + wide, base + 14, "middle", f"{x_max:,.4g}"),
            (MARGIN + wide / 2, base + 14, "middle", self.x_label),
        ]
        labels = "".join(
            f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' {STYLE}>{escape(text)}</text>"
            for x, y, anchor, text in texts
        )
        return (
            f"<g transform='translate({left},{top})'><path d='{frame}' fill='none' stroke='#999'/>"
            f"<polyline points='{points}' fill='none' stroke='#1f6feb' stroke-width='1.5'/>"
            f"{labels}</g>"
        )


def distribution(title: str, values: Floats) -> Panel:
    """Return the share of values that are at most x."""
    values = np.sort(values[~np.isnan(values)])
    shares = np.linspace(0, 100, NUM_POINTS)
    x = np.percentile(values, shares) if len(values) else np.zeros(NUM_POINTS)
    return Panel(f"{title}: % of all within", "ms", x, shares)


def panels_of(outcome: Outcome) -> list[Panel]:
    """Return everything that is drawn."""
    good = [record for record in outcome.records if not record.error]
    times = Times.of(good)
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


def draw(outcome: Outcome, title: str) -> str:
    """Return an SVG document."""
    panels = panels_of(outcome)
    rows = -(-len(panels) // COLUMNS)
    drawn = "".join(
        panel.svg(WIDTH * (i % COLUMNS), 24 + HEIGHT * (i // COLUMNS))
        for i, panel in enumerate(panels)
    )
    size = f"width='{WIDTH * COLUMNS}' height='{24 + HEIGHT * rows}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size}><rect {size} fill='white'/>"
        f"<text x='{MARGIN}' y='18' {STYLE}>{escape(title)}</text>{drawn}</svg>\n"
    )


def write_plot(path: Path, outcome: Outcome, result: dict[str, Any]) -> None:
    """Write the plot, as SVG or, in a `.html` file, as a page with the figures below it."""
    title = f"{result['model_id']}, {result['num_prompts']} requests, rate {result['request_rate']}"
    svg = draw(outcome, title)
    if path.suffix != ".html":
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
