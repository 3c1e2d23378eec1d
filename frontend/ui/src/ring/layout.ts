// Where the nodes of the drawing are: a ring where there is room, else a column. Pure.

import type { Group, Node } from "./nodes";

export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface Edge {
  path: string;
  label: { x: number; y: number };
  group: Group; // that it leads from
}

export interface Drawing {
  width: number;
  height: number;
  groups: { group: Group; box: Box; nodes: { node: Node; box: Box }[] }[];
  edges: Edge[];
  middle: { x: number; y: number } | null;
}

const NODE_WIDTH = 240;
const LINE = 17;
const HEAD = 28; // of a node: its title
const PAD = 10;
const TITLE = 26; // of a group
const GAP = 8;
const WIDE = 1080;
const NARROW = 344;
const MIN_HOLE = 150; // between the upper and the lower group

export function nodeHeight(node: Node): number {
  const lines = node.lines.length + (node.note ? 1 : 0) + node.bars.length;
  return HEAD + LINE * lines + 6;
}

function groupHeight(group: Group): number {
  return TITLE + group.nodes.reduce((sum, node) => sum + nodeHeight(node) + GAP, PAD - GAP);
}

const GROUP_WIDTH = NODE_WIDTH + 2 * PAD;

function placed(group: Group, x: number, y: number) {
  let top = y + TITLE;
  const nodes = group.nodes.map((node) => {
    const box = { x: x + PAD, y: top, width: NODE_WIDTH, height: nodeHeight(node) };
    top += box.height + GAP;
    return { node, box };
  });
  return { group, nodes, box: { x, y, width: GROUP_WIDTH, height: groupHeight(group) } };
}

export function wide(groups: Group[]): Drawing {
  const [frontend, tokenizer, engine, detokenizer] = groups as [Group, Group, Group, Group];
  const [left, top, right, bottom] = groups.map(groupHeight) as [number, number, number, number];
  const side = Math.max(left, right);
  const height = Math.max(top + bottom + MIN_HOLE, side + Math.max(top, bottom) + 40, side + 120);
  const middle = (WIDE - GROUP_WIDTH) / 2;
  const last = WIDE - GROUP_WIDTH - 1;
  const centre = (top + (height - bottom)) / 2;
  const clamp = (y: number, own: number) => Math.min(Math.max(y, 1), height - own - 1);
  const boxes = [
    placed(frontend, 1, clamp(centre - left / 2, left)),
    placed(tokenizer, middle, 1),
    placed(engine, last, clamp(centre - right / 2, right)),
    placed(detokenizer, middle, height - bottom - 1),
  ];
  const [f, t, e, d] = boxes.map(({ box }) => box) as [Box, Box, Box, Box];
  const upper = Math.min(t.y + t.height / 2, f.y - 20, e.y - 20);
  const lower = Math.max(d.y + d.height / 2, f.y + f.height + 20, e.y + e.height + 20);
  const fx = f.x + f.width / 2;
  const ex = e.x + e.width / 2;
  const inside = (y: number, box: Box) =>
    Math.min(Math.max(y, box.y + 14), box.y + box.height - 14);
  const edges = [
    corner(frontend, fx, f.y, fx, inside(upper, t), t.x, inside(upper, t)),
    corner(tokenizer, t.x + t.width, inside(upper, t), ex, inside(upper, t), ex, e.y),
    corner(engine, ex, e.y + e.height, ex, inside(lower, d), d.x + d.width, inside(lower, d)),
    corner(detokenizer, d.x, inside(lower, d), fx, inside(lower, d), fx, f.y + f.height),
  ];
  return { width: WIDE, height, groups: boxes, edges, middle: { x: WIDE / 2, y: centre } };
}

// A path by way of a rounded corner. Its label is on the horizontal part.
function corner(
  group: Group,
  x0: number,
  y0: number,
  cx: number,
  cy: number,
  x1: number,
  y1: number,
) {
  const radius = Math.min(36, Math.abs(x1 - x0) / 2, Math.abs(y1 - y0) / 2);
  const towards = (from: number, to: number) => to + Math.sign(from - to) * radius;
  const isUpright = cx === x0; // the first part
  const before = isUpright ? [cx, towards(y0, cy)] : [towards(x0, cx), cy];
  const after = isUpright ? [towards(x1, cx), cy] : [cx, towards(y1, cy)];
  const path = `M${x0} ${y0}L${before.join(" ")}Q${cx} ${cy} ${after.join(" ")}L${x1} ${y1}`;
  return { group, path, label: { x: (cx + (isUpright ? x1 : x0)) / 2, y: cy } };
}

export function narrow(groups: Group[]): Drawing {
  const between = 52;
  const x = 1;
  let y = 1;
  const boxes = groups.map((group) => {
    const found = placed(group, x, y);
    y += found.box.height + between;
    return found;
  });
  const height = y - between + 40;
  const centre = x + GROUP_WIDTH / 2;
  const edges: Edge[] = boxes.slice(0, -1).map(({ group, box }) => {
    const start = box.y + box.height;
    return {
      group,
      path: `M${centre} ${start}L${centre} ${start + between}`,
      label: { x: centre, y: start + between / 2 },
    };
  });
  const [first, last] = [boxes[0]!, boxes[boxes.length - 1]!];
  const right = NARROW - 24;
  const [from, to] = [last.box.y + last.box.height, first.box.y + first.box.height / 2];
  edges.push({
    group: last.group,
    path: `M${centre} ${from}v20H${right}V${to}H${x + GROUP_WIDTH}`,
    label: { x: centre + 40, y: from + 20 },
  });
  return { width: NARROW, height, groups: boxes, edges, middle: null };
}
