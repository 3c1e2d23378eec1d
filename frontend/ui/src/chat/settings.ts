// Sampling settings, kept in the browser. What is left empty is the server's default.

import { effect, signal } from "@preact/signals";

const SETTINGS = "headrace.settings";

export interface SettingField {
  name: string; // as in the API
  label: string;
  min?: number;
  max?: number;
  step?: number;
}

export const NUMBERS: SettingField[] = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, max: 2, step: 0.05 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
];

export interface Settings {
  model: string; // empty: the first of those that are served
  system: string;
  stop: string; // a line for each text
  tools: string; // JSON
  others: string; // JSON: further fields of the request
  numbers: Record<string, string>;
}

const EMPTY: Settings = { model: "", system: "", stop: "", tools: "", others: "", numbers: {} };

export const settings = signal<Settings>(read());

effect(() => localStorage.setItem(SETTINGS, JSON.stringify(settings.value)));

function read(): Settings {
  try {
    return { ...EMPTY, ...JSON.parse(localStorage.getItem(SETTINGS) ?? "{}") };
  } catch {
    return EMPTY;
  }
}

export function resetSettings(): void {
  settings.value = { ...EMPTY, model: settings.value.model };
}

// Why a text is not the JSON that is wanted; null where it is, or is empty.
export function faultIn(text: string, isWanted: (value: unknown) => boolean): string | null {
  if (!text.trim()) return null;
  try {
    return isWanted(JSON.parse(text)) ? null : "This is JSON of another form.";
  } catch (error) {
    return (error as Error).message;
  }
}

export function isObject(value: unknown): boolean {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

// The fields of a request. JSON with a fault is left out; the panel shows the fault.
export function fieldsOf(settings: Settings): Record<string, unknown> {
  const fields: Record<string, unknown> = {};
  for (const { name } of NUMBERS) {
    const given = settings.numbers[name];
    if (given) fields[name] = Number(given);
  }
  const stop = settings.stop.split("\n").filter((line) => line);
  if (stop.length) fields.stop = stop;
  if (settings.tools.trim() && !faultIn(settings.tools, Array.isArray)) {
    fields.tools = JSON.parse(settings.tools);
  }
  if (settings.others.trim() && !faultIn(settings.others, isObject)) {
    Object.assign(fields, JSON.parse(settings.others));
  }
  return fields;
}
