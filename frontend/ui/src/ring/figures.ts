// Rates between states, and numbers as texts.

import type { EngineState, RingProcess, RingState } from "./state";

const RATE_STATES = 4; // over which rates are taken: 3 s

// Returns how fast a counter of a process grows, per second; null where that is not known.
export function rate<P extends RingProcess>(
  states: RingState[],
  find: (state: RingState) => P | undefined,
  count: (process: P) => number,
): number | null {
  const few = states.slice(-RATE_STATES);
  const [first, last] = [few[0], few[few.length - 1]];
  if (!first || !last || last.at <= first.at) return null;
  const [before, now] = [find(first), find(last)];
  if (!before || !now || before.pid !== now.pid || before.state !== now.state) return null;
  return Math.max(count(now) - count(before), 0) / (last.at - first.at);
}

export function kvUsage(engines: EngineState[]): number | null {
  const pages = sum(engines, (engine) => engine.kv_pages);
  return pages ? 1 - sum(engines, (engine) => engine.kv_pages_free) / pages : null;
}

// Returns the share of prompts found in the prefix cache: within the states, else since the start.
export function hitRate(states: RingState[]): number | null {
  return shareOf(states, "prefix_hits", "prefix_queries");
}

// Returns the share of drafted tokens that were accepted, likewise.
export function acceptance(states: RingState[]): number | null {
  return shareOf(states, "right_drafts", "drafts");
}

type EngineCounter = "prefix_hits" | "prefix_queries" | "right_drafts" | "drafts";

function shareOf(states: RingState[], part: EngineCounter, whole: EngineCounter): number | null {
  const [first, last] = [states[0], states[states.length - 1]];
  if (!first || !last) return null;
  const total = ({ engines }: RingState, counter: EngineCounter) =>
    sum(engines, (engine) => engine[counter]);
  const isNew = total(last, whole) > total(first, whole);
  const grown = (counter: EngineCounter) =>
    total(last, counter) - (isNew ? total(first, counter) : 0);
  // Pages that other prompts have filled meanwhile are hits without a query.
  return grown(whole) ? Math.min(grown(part) / grown(whole), 1) : null;
}

export function sum<T>(items: T[], value: (item: T) => number): number {
  return items.reduce((total, item) => total + value(item), 0);
}

export const NOTHING = "–";

export function count(value: number | null): string {
  if (value === null) return NOTHING;
  if (value >= 10_000) return compact.format(value);
  return value < 10 && value % 1 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function percent(value: number | null): string {
  if (value === null) return NOTHING;
  return `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

export function bytes(value: number): string {
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function duration(seconds: number | null): string {
  if (seconds === null) return NOTHING;
  if (seconds < 0.001) return `${short(seconds * 1e6)} µs`;
  if (seconds < 1) return `${short(seconds * 1e3)} ms`;
  if (seconds < 120) return `${short(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

function short(value: number): string {
  return value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(2)));
}

export function clock(at: number): string {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function several(number: number, noun: string, nouns = `${noun}s`): string {
  return `${count(number)} ${number === 1 ? noun : nouns}`;
}
