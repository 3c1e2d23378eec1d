// Requests to the server that the page came from. The key is asked for when the server wants one.

import { signal } from "@preact/signals";

import { removeKey, storeKey, storedKey } from "./api_key";

export interface Model {
  id: string;
  parent?: string | null; // of an adapter, the model that it belongs to
  max_model_len?: number;
}

interface ModelInfo {
  has_image_understanding: boolean;
  is_generation: boolean;
}

export class ServerError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

const FIRST_DELAY_MS = 500;
const MAX_DELAY_MS = 4000;

export type Connection = "up" | "down" | "starting";
export const connection = signal<Connection>("up");
export const models = signal<Model[]>([]);
export const takesImages = signal(false);
export const generates = signal(true); // a model of embeddings or scores makes no texts
// Why the key is asked for; null while it is not.
export const keyQuestion = signal<"missing" | "wrong" | null>(null);

let apiKey = storedKey();
let answerKey: (() => void)[] = [];

export function hasKey(): boolean {
  return apiKey !== "";
}

export function setKey(key: string, isKept: boolean): void {
  apiKey = key.trim();
  storeKey(apiKey, isKept);
  closeQuestion();
  if (!models.value.length) void describe();
}

export function forgetKey(): void {
  apiKey = "";
  removeKey();
}

// Closes the dialog; requests that wait for a key go on with the one there is, and may fail.
export function closeQuestion(): void {
  keyQuestion.value = null;
  const waiting = answerKey;
  answerKey = [];
  waiting.forEach((resolve) => resolve());
}

// Returns a successful response. Throws ServerError, or what fetch throws; a path is relative.
export async function request(path: string, init: RequestInit = {}): Promise<Response> {
  for (;;) {
    const key = apiKey;
    const response = await send(path, key, init);
    if (response.ok) return response;
    if (response.status !== 401) throw await errorOf(response);
    if (key === apiKey) {
      keyQuestion.value = key === "" ? "missing" : "wrong";
      await new Promise<void>((resolve) => answerKey.push(resolve));
    }
    if (key === apiKey) throw await errorOf(response);
  }
}

export function post(path: string, body: unknown, signal?: AbortSignal): Promise<Response> {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

export async function getJson<T>(path: string): Promise<T> {
  const response = await request(path);
  return (await response.json()) as T;
}

async function send(path: string, key: string, init: RequestInit): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  try {
    const response = await fetch(path, { ...init, headers, credentials: "omit" });
    if (connection.value === "down") connection.value = "up";
    return response;
  } catch (error) {
    if (!init.signal?.aborted) watch();
    throw error;
  }
}

async function errorOf(response: Response): Promise<ServerError> {
  const text = await response.text();
  let message = text || response.statusText;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not an error of the API: shown as it is
  }
  return new ServerError(message, response.status);
}

// Asks for /health until the server answers; once it serves, what it serves is read anew.
export function watch(): void {
  if (connection.value !== "up") return;
  connection.value = "down";
  let delay = FIRST_DELAY_MS;
  const ask = async () => {
    try {
      const response = await fetch("health", { cache: "no-store", credentials: "omit" });
      connection.value = response.ok ? "up" : "starting";
    } catch {
      connection.value = "down";
    }
    if (connection.peek() === "up") {
      void describe();
    } else {
      delay = Math.min(delay * 1.5, MAX_DELAY_MS);
      setTimeout(ask, delay);
    }
  };
  setTimeout(ask, delay);
}

// Reads which models are served, and whether they take images.
export async function describe(): Promise<void> {
  try {
    models.value = (await getJson<{ data: Model[] }>("v1/models")).data;
    const info = await getJson<ModelInfo>("model_info");
    takesImages.value = info.has_image_understanding;
    generates.value = info.is_generation;
  } catch (error) {
    if (!(error instanceof ServerError)) watch();
  }
}
