// Conversations with the model.

import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";

import { generates, models } from "../server";
import { Composer } from "./composer";
import { openCalls } from "./conversation";
import { exportJson, exportMarkdown } from "./export";
import { isRunning, modelInUse } from "./generation";
import { current, load } from "./history";
import { MessageView } from "./message_view";
import { loadMarkdown } from "./rich_text";
import { SettingsPanel } from "./settings_panel";
import { Sidebar } from "./sidebar";
import { ToolResults } from "./tool_results";

const NEAR_END_PX = 60; // a reader this near to the end follows it

void load();

export function Chat() {
  const panel = useSignal<"none" | "settings" | "history">("none");
  const toggle = (name: "settings" | "history") =>
    (panel.value = panel.value === name ? "none" : name);
  useEffect(() => void loadMarkdown(), []);
  return (
    <div class="chat" data-panel={panel.value}>
      <Sidebar onChoose={() => (panel.value = "none")} />
      <section class="conversation" aria-label="Conversation">
        <h1 class="hidden">Chat</h1>
        <div class="row tools">
          <button
            type="button"
            class="quiet small narrow"
            aria-expanded={panel.value === "history"}
            onClick={() => toggle("history")}
          >
            Chats
          </button>
          <span class="model">{modelInUse()}</span>
          <ExportButtons />
          <button
            type="button"
            class="quiet small"
            aria-expanded={panel.value === "settings"}
            onClick={() => toggle("settings")}
          >
            Settings
          </button>
        </div>
        <Messages />
        <Composer />
      </section>
      {panel.value === "settings" && <SettingsPanel onClose={() => (panel.value = "none")} />}
    </div>
  );
}

function ExportButtons() {
  const conversation = current.value;
  if (!conversation.messages.length) return null;
  return (
    <>
      <button
        type="button"
        class="quiet small"
        onClick={() => exportMarkdown(conversation)}
        aria-label="Export .md, as Markdown"
      >
        Export .md
      </button>
      <button
        type="button"
        class="quiet small"
        onClick={() => exportJson(conversation)}
        aria-label="Export .json, in the form of the API"
      >
        .json
      </button>
    </>
  );
}

function Messages() {
  const { messages, id } = current.value;
  const box = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  useLayoutEffect(() => {
    follows.current = true;
  }, [id, messages.length]);
  // The end stays in sight while the text grows, or the box shrinks.
  useLayoutEffect(() => {
    const { current: seen } = box;
    const watcher = new ResizeObserver(() => {
      if (follows.current) seen!.scrollTop = seen!.scrollHeight;
    });
    watcher.observe(seen!);
    watcher.observe(seen!.firstElementChild!);
    return () => watcher.disconnect();
  }, []);
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current!;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  };
  const calls = isRunning.value ? [] : openCalls(messages);
  return (
    <div
      class="messages"
      ref={box}
      onScroll={onScroll}
      tabIndex={0}
      role="region"
      aria-label="Messages"
    >
      <div class="column">
        {!messages.length && <Greeting />}
        {messages.map((message, at) => (
          <MessageView
            key={`${id} ${at}`}
            message={message}
            at={at}
            isLast={at === messages.length - 1}
          />
        ))}
        {calls.length > 0 && <ToolResults calls={calls} />}
        <p class="hidden" role="status">
          {isRunning.value
            ? "The model answers."
            : messages.length
              ? "The answer is complete."
              : ""}
        </p>
      </div>
    </div>
  );
}

function Greeting() {
  if (!generates.value) {
    return (
      <div class="greeting">
        <h2>{modelInUse()} makes no texts</h2>
        <p class="muted">
          It makes embeddings or scores: see <a href="#try">Try</a>.
        </p>
      </div>
    );
  }
  const length = models.value.find((model) => model.id === modelInUse())?.max_model_len;
  return (
    <div class="greeting">
      <h2>Chat with {modelInUse() || "the model"}</h2>
      {length && <p class="muted">A conversation may have {length.toLocaleString("en")} tokens.</p>}
    </div>
  );
}
