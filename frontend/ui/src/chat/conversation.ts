// A conversation, and what is asked of the server with it. Pure.

import { fieldsOf, type Settings } from "./settings";

export interface Picture {
  name: string;
  url: string; // data:
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Stats {
  firstTokenMs: number | null; // null: no token has come
  tokensPerSecond: number | null; // null: fewer than two tokens
  tokens: number;
  isExact: boolean; // tokens by the server's count; else events of the stream
}

// `running` until the stream ends; `stopped` by the user or by a reload; `failed` says why.
export type End = "running" | "stop" | "length" | "tool_calls" | "stopped" | "failed";

export interface UserMessage {
  role: "user";
  text: string;
  pictures: Picture[];
}

export interface Answer {
  role: "assistant";
  model: string;
  text: string;
  thoughts: string;
  calls: ToolCall[];
  end: End;
  error?: string;
  stats?: Stats;
}

export interface ToolResult {
  role: "tool";
  callId: string;
  text: string;
}

export type Message = UserMessage | Answer | ToolResult;

export interface Conversation {
  id: string;
  title: string;
  updatedAt: number; // ms since the epoch; 0 before the first message
  messages: Message[];
}

const TITLE_LENGTH = 60;

export function newConversation(): Conversation {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}`, title: "", updatedAt: 0, messages: [] };
}

export function titleOf(messages: Message[]): string {
  const first = messages.find((message) => message.role === "user");
  const line = first?.text.trim().split("\n")[0] ?? "";
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH)}…` : line || "Image";
}

// The calls of the last answer that still lack a result.
export function openCalls(messages: Message[]): ToolCall[] {
  const at = messages.findLastIndex((message) => message.role === "assistant");
  const answer = messages[at];
  if (answer?.role !== "assistant" || answer.end === "running") return [];
  const later = messages.slice(at + 1).map((one) => (one.role === "tool" ? one.callId : ""));
  return answer.calls.filter((call) => !later.includes(call.id));
}

// The body of a chat completion. With `continues`, the last answer is taken up where it ends.
export function requestOf(
  messages: Message[],
  model: string,
  settings: Settings,
  continues = false,
): Record<string, unknown> {
  const system = settings.system.trim();
  return {
    ...(model ? { model } : {}), // unknown until the server has told which it serves
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages.map(sent)],
    stream: true,
    stream_options: { include_usage: true },
    ...fieldsOf(settings),
    ...(continues ? { continue_final_message: true, add_generation_prompt: false } : {}),
  };
}

// A message in the form of the API.
export function sent(message: Message): Record<string, unknown> {
  switch (message.role) {
    case "user": {
      const { text, pictures } = message;
      if (!pictures.length) return { role: "user", content: text };
      const images = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
      return { role: "user", content: [...images, ...(text ? [{ type: "text", text }] : [])] };
    }
    case "tool":
      return { role: "tool", tool_call_id: message.callId, content: message.text };
    case "assistant": {
      const calls = message.calls.map(({ id, name, arguments: text }) => {
        return { id, type: "function", function: { name, arguments: text } };
      });
      const content = message.text || (calls.length ? null : "");
      return { role: "assistant", content, ...(calls.length ? { tool_calls: calls } : {}) };
    }
  }
}
