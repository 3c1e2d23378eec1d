// How a latency of the last hour is distributed, as bars.

import { count, duration, sum } from "./figures";
import type { Distribution } from "./state";

const WIDTH = 360;
const HEIGHT = 130;
const BELOW = 18;
const MIN_BARS = 5;
const MAX_LABELS = 8;

export function Histogram({ title, distribution }: { title: string; distribution: Distribution }) {
  const { bounds, counts } = distribution;
  const total = sum(counts, (one) => one);
  const [first, last] = range(counts);
  const shown = counts.slice(first, last + 1);
  const most = Math.max(...shown, 1);
  const width = WIDTH / Math.max(shown.length, 1);
  const upTo = (at: number) => {
    const bound = bounds[first + at];
    return bound === undefined ? `over ${duration(bounds[bounds.length - 1]!)}` : duration(bound);
  };
  const every = shown.length > MAX_LABELS ? 2 : 1;
  const height = (one: number) => ((HEIGHT - 18) * one) / most;
  const texts = shown.map((one, at) => `${upTo(at)}: ${one}`).join(", ");
  return (
    <figure class="plot">
      <figcaption>
        <h3>{title}</h3>
        <p class="keys">
          {total ? `${count(total)} in the last hour, up to …` : "nothing in the last hour"}
        </p>
      </figcaption>
      <svg
        class="histogram"
        viewBox={`0 0 ${WIDTH} ${HEIGHT + BELOW}`}
        role="img"
        aria-label={`${title}, ${total} in the last hour, by upper bound. ${total ? texts : ""}`}
      >
        <line x1="0" x2={WIDTH} y1={HEIGHT} y2={HEIGHT} />
        {total > 0 &&
          shown.map((one, at) => (
            <g key={first + at}>
              <rect
                x={at * width + 1.5}
                width={width - 3}
                rx="2"
                y={HEIGHT - height(one)}
                height={height(one)}
              />
              {one > 0 && (
                <text x={(at + 0.5) * width} y={HEIGHT - height(one) - 4}>
                  {count(one)}
                </text>
              )}
              {at % every === 0 && (
                <text x={(at + 0.5) * width} y={HEIGHT + 14}>
                  {upTo(at)}
                </text>
              )}
            </g>
          ))}
      </svg>
    </figure>
  );
}

// The buckets from the first to the last that is not empty, and some beside them where they are few.
function range(counts: number[]): [number, number] {
  let first = counts.findIndex((one) => one > 0);
  if (first < 0) return [0, -1];
  let last = counts.findLastIndex((one) => one > 0);
  while (last - first + 1 < MIN_BARS) {
    if (first > 0) first -= 1;
    if (last < counts.length - 1) last += 1;
  }
  return [first, last];
}
