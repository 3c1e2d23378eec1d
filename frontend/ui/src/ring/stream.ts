// The stream of /ring/events, kept open while the tab is seen.

import { signal } from "@preact/signals";

import { readEvents, type ServerEvent } from "../events";
import { request } from "../server";
import type { HistoryNews, HourHistory, RingState } from "./state";

const RETRY_MS = 1000;
const MAX_STATES = 61; // a minute
const MAX_POINTS = 360; // as the server keeps

// The states of the last minute, newest last.
export const states = signal<RingState[]>([]);
export const hour = signal<HourHistory | null>(null);
export const refusal = signal("");

// Follows the ring until the returned function is called. A hidden page reads nothing.
export function follow(): () => void {
  let stop = new AbortController();
  const start = () => {
    stop.abort();
    if (document.hidden) return;
    stop = new AbortController();
    void readUntil(stop.signal);
  };
  start();
  document.addEventListener("visibilitychange", start);
  return () => {
    document.removeEventListener("visibilitychange", start);
    stop.abort();
  };
}

async function readUntil(stop: AbortSignal): Promise<void> {
  while (!stop.aborted) {
    try {
      const response = await request("ring/events", { signal: stop });
      refusal.value = "";
      for await (const event of readEvents(response)) take(event);
    } catch (error) {
      if (stop.aborted) return;
      refusal.value = error instanceof Error ? error.message : String(error);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function take(event: ServerEvent): void {
  switch (event.type) {
    case "history":
      hour.value = JSON.parse(event.data) as HourHistory;
      break;
    case "point":
      if (hour.value) hour.value = extended(hour.value, JSON.parse(event.data) as HistoryNews);
      break;
    case "ring":
      states.value = [...states.value.slice(1 - MAX_STATES), JSON.parse(event.data) as RingState];
  }
}

function extended(before: HourHistory, news: HistoryNews): HourHistory {
  const columns = Object.entries(before.columns).map(([name, column]) => {
    return [name, [...column, news.point[name] ?? null].slice(-MAX_POINTS)] as const;
  });
  const { interval_s } = before;
  return { interval_s, columns: Object.fromEntries(columns), distributions: news.distributions };
}
