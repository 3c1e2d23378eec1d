// The tabs of the page. Each is loaded when it is first shown, but for Chat, which is first.

import { signal } from "@preact/signals";
import type { ComponentType } from "preact";

import { Chat } from "./chat/chat";

export interface Tab {
  id: string;
  title: string;
  load: () => Promise<ComponentType> | ComponentType;
}

export const TABS: Tab[] = [
  { id: "chat", title: "Chat", load: () => Chat },
  { id: "ring", title: "Ring", load: async () => (await import("./ring/ring")).Ring },
  { id: "try", title: "Try", load: async () => (await import("./try/try")).Try },
];

export const tab = signal(tabOfHash());

window.addEventListener("hashchange", () => (tab.value = tabOfHash()));

function tabOfHash(): Tab {
  return TABS.find((one) => `#${one.id}` === location.hash) ?? TABS[0]!;
}
