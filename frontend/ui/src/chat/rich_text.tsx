// Markdown, as plain text until what reads it has been loaded.

import { signal } from "@preact/signals";
import type { ComponentType } from "preact";

const loaded = signal<ComponentType<{ text: string }> | null>(null);

export async function loadMarkdown(): Promise<void> {
  loaded.value = (await import("./markdown")).Markdown;
}

export function RichText({ text }: { text: string }) {
  const Markdown = loaded.value;
  return Markdown ? <Markdown text={text} /> : <div class="markdown plain">{text}</div>;
}
