// All processes as a table: the figures of the drawing, and some more.

import { bytes, clock, percent } from "./figures";
import type { Group, Node } from "./nodes";
import type { RingProcess, RingState } from "./state";

export function ProcessTable({ state, groups }: { state: RingState; groups: Group[] }) {
  const processes = new Map<string, RingProcess>(
    Object.entries(state).flatMap(([roles, list]) =>
      Array.isArray(list) && roles !== "deaths"
        ? (list as RingProcess[]).map((one) => [`${roles.slice(0, -1)} ${one.index}`, one] as const)
        : [],
    ),
  );
  return (
    <details class="processes">
      <summary>All processes as a table</summary>
      <div class="scroll" tabIndex={0} role="region" aria-label="All processes">
        <table>
          <thead>
            <tr>
              <th scope="col">Process</th>
              <th scope="col">State</th>
              <th scope="col">PID</th>
              <th scope="col">Since</th>
              <th scope="col">Restarts</th>
              <th scope="col">CPU</th>
              <th scope="col">Memory</th>
              <th scope="col">Work</th>
            </tr>
          </thead>
          <tbody>
            {groups
              .flatMap(({ nodes }) => nodes)
              .map((node) => {
                const one = processes.get(node.id)!;
                return (
                  <tr key={node.id}>
                    <th scope="row">{node.title}</th>
                    <td>{one.state}</td>
                    <td>{one.pid}</td>
                    <td>{one.served_at === null ? "" : clock(one.served_at)}</td>
                    <td>{one.restarts}</td>
                    <td>{percent(node.busy)}</td>
                    <td>{bytes(one.resident_bytes)}</td>
                    <td>{work(node)}</td>
                  </tr>
                );
              })}
          </tbody>
        </table>
      </div>
      {groups.length > 0 && <p class="muted">On the way: {groups.map(onTheWay).join(", ")}.</p>}
    </details>
  );
}

function work({ lines, bars, note }: Node): string {
  const shares = bars.map(({ label, share }) => `${label} ${percent(share)}`);
  return [...lines, ...shares, note].filter(Boolean).join(" · ");
}

function onTheWay({ title, next }: Group): string {
  return `after ${title.toLowerCase()} ${next.label}`;
}
