// What the drawing shows of each process: a node, in the group of its hop.

import {
  acceptance,
  bytes,
  count,
  duration,
  hitRate,
  kvUsage,
  rate,
  several,
  sum,
} from "./figures";
import type { Death, EngineState, RingProcess, RingState } from "./state";

const RECENT_S = 60; // for which a return is shown
const MAX_NOTE = 32; // characters that a node has room for
const DUTIES = { text: "text", "long text": "long", images: "images", GET: "GET" };

export interface Node {
  id: string; // its role and index
  title: string;
  lines: string[];
  status: "ready" | "starting" | "dead" | "ill" | "returned";
  note: string; // of its death or its return
  busy: number | null; // share of a core
  bars: { label: string; share: number }[];
}

export interface Group {
  id: "frontend" | "tokenizer" | "engine" | "detokenizer";
  title: string;
  nodes: Node[];
  next: { label: string; isBusy: boolean }; // what waits on the way to the next hop
}

type Roles = Exclude<keyof RingState, "at" | "model" | "in_flight" | "deaths">;

// The groups in the order of the ring, from at least one state.
export function groupsOf(states: RingState[]): Group[] {
  const now = states[states.length - 1]!;
  return [frontends, tokenizers, engines, detokenizers].map((group) => group(states, now));
}

function frontends(states: RingState[], now: RingState): Group {
  const queued = sum(now.tokenizers, (one) => one.queued_bytes);
  const { tokenizing } = now.in_flight;
  return {
    id: "frontend",
    title: now.frontends.length > 1 ? "Frontends" : "Frontend",
    nodes: now.frontends.map((one) => {
      const speed = perSecond(states, "frontends", one, "requests", "requests");
      const lines = [several(one.connections, "connection")];
      lines.push(`${speed} · lag ${duration(one.loop_lag_s)}`);
      return node(states, "frontends", one, lines);
    }),
    next: { label: `${several(tokenizing, "request")} · ${bytes(queued)}`, isBusy: tokenizing > 0 },
  };
}

function tokenizers(states: RingState[], now: RingState): Group {
  const { waiting, running } = now.in_flight;
  return {
    id: "tokenizer",
    title: "Tokenizers",
    nodes: [
      ...now.tokenizers.map((one) => {
        const speed = perSecond(states, "tokenizers", one, "requests", "requests");
        const lines = [`${speed} · ${bytes(one.queued_bytes)} queued`];
        const title = `tokenizer ${one.index} · ${DUTIES[one.duty]}`;
        return { ...node(states, "tokenizers", one, lines), title };
      }),
      ...now.fetchers.map((one) => node(states, "fetchers", one, [several(one.images, "image")])),
    ],
    next: { label: `${several(waiting, "sequence")} waiting`, isBusy: waiting > 0 || running > 0 },
  };
}

function engines(states: RingState[], now: RingState): Group {
  const queued = sum(now.detokenizers, (one) => one.queued_steps);
  const steps = (roles: "engines" | "workers", one: RingProcess) =>
    perSecond(states, roles, one, "steps", "steps");
  return {
    id: "engine",
    title: now.engines.length > 1 ? "Engines" : "Engine",
    nodes: [
      ...now.engines.map((one) => {
        const speed = perSecond(states, "engines", one, "generated_tokens", "tokens");
        const lines = [`${one.running} running · ${one.waiting} waiting`];
        lines.push(`${speed} · ${steps("engines", one)}`);
        if (one.preemptions) lines.push(several(one.preemptions, "preemption"));
        return { ...node(states, "engines", one, lines), bars: engineBars(states, one) };
      }),
      ...now.workers.map((one) => node(states, "workers", one, [steps("workers", one)])),
      ...now.visions.map((one) => node(states, "visions", one, [several(one.images, "image")])),
    ],
    next: { label: `${several(queued, "step")} queued`, isBusy: now.in_flight.running > 0 },
  };
}

// Draft hits and state slots where there are any.
function engineBars(states: RingState[], one: EngineState): Node["bars"] {
  const bars = [
    { label: "KV cache", share: kvUsage([one]) ?? 0 },
    { label: "Prefix hits", share: hitRate(states) ?? 0 },
  ];
  if (one.drafts) bars.push({ label: "Draft hits", share: acceptance(states) ?? 0 });
  if (one.state_slots) {
    bars.push({ label: "State slots", share: 1 - one.state_slots_free / one.state_slots });
  }
  return bars;
}

function detokenizers(states: RingState[], now: RingState): Group {
  const queued = several(
    sum(now.frontends, (one) => one.queued_messages),
    "message",
  );
  const { rendering, unsent_bytes } = now.in_flight;
  return {
    id: "detokenizer",
    title: now.detokenizers.length > 1 ? "Detokenizers" : "Detokenizer",
    nodes: now.detokenizers.map((one) => {
      const speed = perSecond(states, "detokenizers", one, "tokens", "tokens");
      const lines = [`${several(one.open_replies, "reply", "replies")} open · ${speed}`];
      return node(states, "detokenizers", one, lines);
    }),
    next: { label: `${queued} · ${bytes(unsent_bytes)} unsent`, isBusy: rendering > 0 },
  };
}

// How fast a counter of a process grows, as text.
function perSecond<R extends Roles>(
  states: RingState[],
  roles: R,
  process: RingProcess,
  field: keyof RingState[R][number],
  noun: string,
): string {
  const find = (state: RingState) =>
    (state[roles] as RingState[R][number][]).find((one) => one.index === process.index);
  return `${count(rate(states, find, (one) => one[field] as number))} ${noun}/s`;
}

function node(states: RingState[], roles: Roles, process: RingProcess, lines: string[]): Node {
  const role = roles.slice(0, -1);
  const now = states[states.length - 1]!;
  const last = now.deaths.filter((one) => one.role === role && one.index === process.index).pop();
  const isBack = last?.back_at != null && now.at - last.back_at < RECENT_S;
  const find = (state: RingState) =>
    (state[roles] as RingProcess[]).find((one) => one.index === process.index);
  return {
    id: `${role} ${process.index}`,
    title: `${role} ${process.index}`,
    lines,
    status: statusOf(process, isBack),
    note: cut(noteOf(process, now.at, last, isBack)),
    busy: rate(states, find, (one) => one.busy_s),
    bars: [],
  };
}

function statusOf(process: RingProcess, isBack: boolean): Node["status"] {
  if (process.state === "dead" || process.state === "absent") return "dead";
  if (process.state === "starting") return "starting";
  if (process.fault) return "ill";
  return isBack ? "returned" : "ready";
}

function noteOf(process: RingProcess, at: number, last: Death | undefined, isBack: boolean) {
  if (process.state !== "ready" && last && last.back_at === null) {
    const seconds = Math.max(Math.round(at - last.died_at), 0);
    return `${last.how.replace(/^was /, "")}, ${seconds} s ago`;
  }
  if (process.state !== "ready") return process.state;
  if (process.fault) return process.fault;
  return isBack ? returned(last!) : "";
}

function cut(text: string): string {
  return text.length > MAX_NOTE ? `${text.slice(0, MAX_NOTE - 1)}…` : text;
}

export function returned(death: Death): string {
  if (death.back_at === null) return "not back yet";
  return `back after ${duration(Math.max(death.back_at - death.died_at, 0))}`;
}
