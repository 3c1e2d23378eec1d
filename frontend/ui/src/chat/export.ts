// A conversation as a file: Markdown to read, JSON in the form of the API.

import { download } from "../download";
import { sent, type Conversation, type Message } from "./conversation";

export function exportJson(conversation: Conversation): void {
  const { title, updatedAt, messages } = conversation;
  const body = {
    title,
    updated_at: new Date(updatedAt).toISOString(),
    messages: messages.map(sent),
  };
  download(nameOf(conversation, "json"), "application/json", JSON.stringify(body, null, 2));
}

export function exportMarkdown(conversation: Conversation): void {
  const parts = [`# ${conversation.title}`, ...conversation.messages.map(asMarkdown)];
  download(nameOf(conversation, "md"), "text/markdown", `${parts.join("\n\n")}\n`);
}

function asMarkdown(message: Message): string {
  switch (message.role) {
    case "user":
      return ["## User", ...message.pictures.map(({ name }) => `[${name}]`), message.text].join(
        "\n\n",
      );
    case "tool":
      return `## Tool result\n\n${fenced(message.text)}`;
    case "assistant": {
      const calls = message.calls.map((call) => `${call.name}\n\n${fenced(call.arguments)}`);
      return [`## ${message.model}`, message.text, ...calls].filter((part) => part).join("\n\n");
    }
  }
}

function fenced(text: string): string {
  return `\`\`\`json\n${text}\n\`\`\``;
}

function nameOf({ title }: Conversation, ending: string): string {
  const name = title
    .toLowerCase()
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .replace(/^-|-$/g, "");
  return `${name || "chat"}.${ending}`;
}
