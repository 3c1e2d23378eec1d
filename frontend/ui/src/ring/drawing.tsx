// The drawing of the ring. A table has the same figures for those who do not see it.

import { signal } from "@preact/signals";

import { count, percent } from "./figures";
import { narrow, wide, type Box, type Drawing, type Edge } from "./layout";
import type { Group, Node } from "./nodes";

const NARROW = matchMedia("(max-width: 56rem)");
const isNarrow = signal(NARROW.matches);
NARROW.addEventListener("change", () => (isNarrow.value = NARROW.matches));

export function RingDrawing({
  groups,
  tokensPerS,
  running,
}: {
  groups: Group[];
  tokensPerS: number | null;
  running: number;
}) {
  const drawing = isNarrow.value ? narrow(groups) : wide(groups);
  return (
    <svg
      class={`ring ${isNarrow.value ? "tall" : "wide"}`}
      role="img"
      aria-labelledby="ring-title ring-description"
      viewBox={`0 0 ${drawing.width} ${drawing.height}`}
    >
      <title id="ring-title">The processes of the server as a ring</title>
      <desc id="ring-description">{described(groups)}</desc>
      <defs>
        <marker
          id="ring-arrow"
          viewBox="0 0 10 10"
          refX="9"
          refY="5"
          markerWidth="8"
          markerHeight="8"
          markerUnits="userSpaceOnUse"
          orient="auto"
        >
          <path class="arrow" d="M0 0L10 5L0 10z" />
        </marker>
      </defs>
      {drawing.edges.map((edge) => (
        <Way key={edge.group.id} edge={edge} />
      ))}
      {drawing.groups.map(({ group, box, nodes }) => (
        <g key={group.id}>
          <rect class="group" {...box} rx="12" />
          <text class="group-title" x={box.x + 12} y={box.y + 18}>
            {group.title}
          </text>
          {nodes.map((one) => (
            <Process key={one.node.id} {...one} />
          ))}
        </g>
      ))}
      <Middle drawing={drawing} tokensPerS={tokensPerS} running={running} />
    </svg>
  );
}

function described(groups: Group[]): string {
  return groups
    .map(({ title, nodes, next }) => {
      const texts = nodes.map(({ title, note, lines }) => [title, note, ...lines].filter(Boolean));
      return `${title}: ${texts.map((one) => one.join(", ")).join("; ")}. Then ${next.label}.`;
    })
    .join(" ");
}

function Way({ edge: { path, label, group } }: { edge: Edge }) {
  const width = 6.3 * group.next.label.length + 18;
  return (
    <g class={group.next.isBusy ? "way busy" : "way"}>
      <path d={path} marker-end="url(#ring-arrow)" />
      <rect x={label.x - width / 2} y={label.y - 11} width={width} height="22" rx="11" />
      <text x={label.x} y={label.y + 4} text-anchor="middle">
        {group.next.label}
      </text>
    </g>
  );
}

function Process({ node, box }: { node: Node; box: Box }) {
  const { x, y, width, height } = box;
  const lines = node.note ? [...node.lines, node.note] : node.lines;
  const below = y + 28 + 17 * lines.length;
  return (
    <g class={`node ${node.status}`} data-process={node.id} data-status={node.status}>
      <rect class="card" {...box} rx="8" />
      <circle class="dot" cx={x + 14} cy={y + 16} r="4" />
      <text class="name" x={x + 26} y={y + 20}>
        {node.title}
      </text>
      <text class="busy" x={x + width - 10} y={y + 20} text-anchor="end">
        {node.busy === null ? "" : `${percent(node.busy)} CPU`}
      </text>
      {lines.map((line, at) => (
        <text
          key={at}
          class={at < node.lines.length ? "line" : "line note"}
          x={x + 26}
          y={y + 37 + 17 * at}
        >
          {line}
        </text>
      ))}
      {node.bars.map(({ label, share: part }, at) => (
        <g key={label} class="share">
          <text class="line" x={x + 26} y={below + 9 + 17 * at}>
            {label}
          </text>
          <rect class="track" x={x + 104} y={below + 2 + 17 * at} width="66" height="7" rx="3.5" />
          <rect
            class="fill"
            x={x + 104}
            y={below + 2 + 17 * at}
            width={66 * part}
            height="7"
            rx="3.5"
          />
          <text class="line" x={x + width - 10} y={below + 9 + 17 * at} text-anchor="end">
            {percent(part)}
          </text>
        </g>
      ))}
      <rect
        class="load"
        x={x + 8}
        y={y + height - 3}
        height="3"
        rx="1.5"
        width={(width - 16) * share(node.busy)}
      />
    </g>
  );
}

const MIN_SHARE = 0.02; // less than that of a core is not drawn

function share(busy: number | null): number {
  return busy === null || busy < MIN_SHARE ? 0 : Math.min(busy, 1);
}

function Middle({
  drawing,
  tokensPerS,
  running,
}: {
  drawing: Drawing;
  tokensPerS: number | null;
  running: number;
}) {
  if (!drawing.middle) return null;
  const { x, y } = drawing.middle;
  return (
    <g class="middle" text-anchor="middle">
      <text class="large" x={x} y={y + 2}>
        {count(tokensPerS)}
      </text>
      <text x={x} y={y + 22}>
        tokens/s · {running} running
      </text>
    </g>
  );
}
