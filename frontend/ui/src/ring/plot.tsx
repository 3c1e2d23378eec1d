// A plot of some columns of the last hour, by uPlot.

import { useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";

import type { Column, HourHistory } from "./state";
import { colourOf, themeChanges } from "./theme_colour";

const HEIGHT = 150;
const MIN_S = 300; // that the time axis spans
const FONT = "12px system-ui, sans-serif";

export interface Series {
  column: string;
  label: string;
}

export interface PlotOf {
  title: string;
  series: Series[];
  format: (value: number | null) => string;
  max?: number; // of the axis, where it is always the same
}

export function Plot({ plot, hour }: { plot: PlotOf; hour: HourHistory }) {
  const place = useRef<HTMLDivElement>(null);
  const drawn = useRef<uPlot | null>(null);
  useEffect(() => {
    const element = place.current!;
    const made = new uPlot(options(plot, element), dataOf(plot, hour), element);
    drawn.current = made;
    const sizes = new ResizeObserver(() =>
      made.setSize({ width: element.clientWidth, height: HEIGHT }),
    );
    sizes.observe(element);
    return () => {
      sizes.disconnect();
      made.destroy();
    };
  }, []);
  useEffect(() => drawn.current?.setData(dataOf(plot, hour)), [hour]);
  useSignalEffect(() => {
    themeChanges.value;
    drawn.current?.redraw(false, true);
  });
  const latest = plot.series.map(({ column, label }, at) => (
    <span key={column} class={`key series-${at + 1}`}>
      {label} <b>{plot.format(newest(hour.columns[column]))}</b>
    </span>
  ));
  return (
    <figure class="plot">
      <figcaption>
        <h3>{plot.title}</h3>
        <p class="keys">{latest}</p>
      </figcaption>
      <div ref={place} role="img" aria-label={summary(plot, hour)} />
    </figure>
  );
}

function newest(column: Column | undefined): number | null {
  return column?.[column.length - 1] ?? null;
}

function summary(plot: PlotOf, hour: HourHistory): string {
  const texts = plot.series.map(({ column, label }) => {
    const values = (hour.columns[column] ?? []).filter((value) => value !== null);
    if (!values.length) return `${label}: nothing yet`;
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return `${label}: from ${plot.format(low)} to ${plot.format(high)}`;
  });
  return `${plot.title} in the last hour. ${texts.join("; ")}.`;
}

function dataOf(plot: PlotOf, hour: HourHistory): uPlot.AlignedData {
  const at = (hour.columns.at ?? []) as number[];
  return [at, ...plot.series.map(({ column }) => hour.columns[column] ?? [])];
}

// An hour once there is one; before that as much as there is.
function span(first: number | null, last: number | null): [number, number] {
  const end = last ?? Date.now() / 1000;
  return [Math.min(first ?? end, end - MIN_S), end];
}

function options(plot: PlotOf, element: Element): uPlot.Options {
  const colour = (property: string) => () => colourOf(element, property);
  const axis: uPlot.Axis = {
    font: FONT,
    stroke: colour("--muted"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
  };
  return {
    width: element.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: {
      x: { range: (_, first, last) => span(first, last) },
      y: { range: (_, __, max) => [0, plot.max ?? (max > 0 ? max * 1.1 : 1)] },
    },
    axes: [
      {
        ...axis,
        space: 52,
        incrs: [60, 120, 300, 600, 900, 1800, 3600],
        values: "{HH}:{mm}",
        size: 26,
      },
      { ...axis, size: 62, space: 32, values: (_, splits) => splits.map(plot.format) },
    ],
    series: [
      {},
      ...plot.series.map(({ label }, at) => ({
        label,
        stroke: colour(`--series-${at + 1}`),
        width: 1.5,
        points: { show: false },
        spanGaps: false,
      })),
    ],
  };
}
