// The conversations, kept in the browser (IndexedDB): images are too large for localStorage.

import { computed, signal } from "@preact/signals";
import { createStore, del, entries, set } from "idb-keyval";

import { newConversation, titleOf, type Conversation, type Message } from "./conversation";

const OPEN = "headrace.conversation";
const SAVE_AFTER_MS = 200;

const store = createStore("headrace", "conversations");
const kept = signal<Conversation[]>([]);

export const current = signal<Conversation>(newConversation());
export const isKept = signal(true); // false where the browser refuses to keep anything
export const conversations = computed(() =>
  [...kept.value].sort((a, b) => b.updatedAt - a.updatedAt),
);

let saving: ReturnType<typeof setTimeout> | undefined;

// Reads what is kept; opens the conversation that was open in this tab of the browser.
export async function load(): Promise<void> {
  try {
    kept.value = (await entries<string, Conversation>(store)).map(([, one]) => ended(one));
  } catch {
    isKept.value = false;
  }
  const open = kept.value.find((one) => one.id === sessionStorage.getItem(OPEN));
  if (open && !current.value.messages.length) current.value = open;
}

// An answer that still runs was cut off by the end of the page.
function ended(conversation: Conversation): Conversation {
  const messages = conversation.messages.map((message): Message =>
    message.role === "assistant" && message.end === "running"
      ? { ...message, end: "stopped" }
      : message,
  );
  return { ...conversation, messages };
}

export function open(conversation: Conversation): void {
  saveNow();
  current.value = conversation;
  sessionStorage.setItem(OPEN, conversation.id);
}

export function startNew(): void {
  open(newConversation());
}

// Sets the messages of a conversation; it is saved a moment later.
export function update(id: string, change: (messages: Message[]) => Message[]): void {
  const old = current.value.id === id ? current.value : kept.value.find((one) => one.id === id);
  if (!old) return;
  const messages = change(old.messages);
  const changed = { ...old, messages, title: titleOf(messages), updatedAt: Date.now() };
  if (current.value.id === id) current.value = changed;
  kept.value = [...kept.value.filter((one) => one.id !== id), changed];
  sessionStorage.setItem(OPEN, current.value.id);
  unsaved.add(id);
  saving ??= setTimeout(saveNow, SAVE_AFTER_MS);
}

const unsaved = new Set<string>();

export function saveNow(): void {
  clearTimeout(saving);
  saving = undefined;
  for (const one of kept.value.filter(({ id }) => unsaved.has(id))) {
    set(one.id, one, store).catch(() => (isKept.value = false));
  }
  unsaved.clear();
}

export function remove(id: string): void {
  kept.value = kept.value.filter((one) => one.id !== id);
  unsaved.delete(id);
  void del(id, store).catch(() => undefined);
  if (current.value.id === id) startNew();
}

addEventListener("pagehide", saveNow);
