// Streams an answer into a conversation. One answer at a time.

import { signal } from "@preact/signals";

import { readEvents } from "../events";
import { models, post, watch, ServerError } from "../server";
import { requestOf, type Answer, type End, type Message } from "./conversation";
import { current, saveNow, update } from "./history";
import { settings } from "./settings";

const BROKEN = "The connection broke off before the answer was complete.";

export const isRunning = signal(false);
let abort: AbortController | null = null;

interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: {
    index: number;
    id?: string;
    function?: { name?: string; arguments?: string };
  }[];
}

interface Chunk {
  choices: { delta: Delta; finish_reason: End | null }[];
  usage?: { completion_tokens: number } | null;
  error?: { message: string };
}

export function stop(): void {
  abort?.abort();
}

export function modelInUse(): string {
  const served = models.value.map((model) => model.id);
  const { model } = settings.value;
  return served.includes(model) ? model : (served[0] ?? model);
}

// Adds messages to the open conversation, and the answer to all of it.
export function send(...added: Message[]): Promise<void> {
  return generate([...current.value.messages, ...added], newAnswer());
}

// Answers anew what stands before a message.
export function answerAgain(at: number): Promise<void> {
  return generate(current.value.messages.slice(0, at), newAnswer());
}

// Continues the last answer where it ends.
export function goOn(): Promise<void> {
  const { messages } = current.value;
  return generate(messages.slice(0, -1), { ...(messages.at(-1) as Answer) });
}

function newAnswer(): Answer {
  const model = modelInUse();
  return { role: "assistant", model, text: "", thoughts: "", calls: [], end: "running" };
}

async function generate(before: Message[], answer: Answer): Promise<void> {
  if (isRunning.value) return;
  const { id } = current.value;
  const stream = new AnswerStream(answer, (now) => update(id, () => [...before, now]));
  const asked = answer.text ? [...before, answer] : before;
  isRunning.value = true;
  abort = new AbortController();
  stream.show();
  saveNow();
  try {
    const body = requestOf(asked, answer.model, settings.value, answer.text !== "");
    const response = await post("v1/chat/completions", body, abort.signal);
    for await (const { data } of readEvents(response)) {
      if (data === "[DONE]") break;
      stream.take(JSON.parse(data) as Chunk);
    }
    stream.end("failed", BROKEN);
  } catch (error) {
    if (abort.signal.aborted) stream.end("stopped");
    else if (error instanceof ServerError) stream.end("failed", error.message);
    else {
      stream.end("failed", BROKEN);
      watch();
    }
  } finally {
    isRunning.value = false;
    saveNow();
  }
}

// An answer as it grows. It is shown once per frame of the screen at most.
class AnswerStream {
  private startedAt = performance.now();
  private firstAt = 0;
  private lastAt = 0;
  private numEvents = 0;
  private numTokens: number | null = null;
  private frame = 0;

  constructor(
    private answer: Answer,
    private set: (answer: Answer) => void,
  ) {
    this.answer = { ...answer, end: "running", error: undefined, stats: undefined };
  }

  show(): void {
    this.frame = 0;
    this.set({ ...this.answer, stats: this.stats() });
  }

  take(chunk: Chunk): void {
    if (chunk.error) throw new ServerError(chunk.error.message, 500);
    if (chunk.usage) this.numTokens = chunk.usage.completion_tokens;
    for (const { delta, finish_reason } of chunk.choices) {
      this.add(delta);
      if (finish_reason) this.answer.end = finish_reason;
    }
    this.frame ||= requestAnimationFrame(() => this.show());
  }

  // Ends the answer for this reason, unless the server has given one.
  end(reason: End, error?: string): void {
    cancelAnimationFrame(this.frame);
    if (this.answer.end === "running") {
      this.answer.end = reason;
      this.answer.error = error;
    }
    this.show();
  }

  private add(delta: Delta): void {
    const { content, reasoning_content: thoughts, tool_calls: calls = [] } = delta;
    if (!content && !thoughts && !calls.length) return;
    this.lastAt = performance.now();
    this.firstAt ||= this.lastAt;
    this.numEvents++;
    this.answer.text += content ?? "";
    this.answer.thoughts += thoughts ?? "";
    for (const { index, id, function: part } of calls) {
      const known = this.answer.calls[index] ?? { id: id ?? "", name: "", arguments: "" };
      const changed = {
        id: known.id,
        name: known.name + (part?.name ?? ""),
        arguments: known.arguments + (part?.arguments ?? ""),
      };
      this.answer.calls = Object.assign([...this.answer.calls], { [index]: changed });
    }
  }

  private stats() {
    const tokens = this.numTokens ?? this.numEvents;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return {
      firstTokenMs: this.firstAt ? this.firstAt - this.startedAt : null,
      tokensPerSecond: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
      tokens,
      isExact: this.numTokens !== null,
    };
  }
}
